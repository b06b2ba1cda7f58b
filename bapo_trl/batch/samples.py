"""
Split TRL's padded batch into samples, and build batches from samples: the only code that pads, splits or merges them.

Splitting a batch and rebuilding it restores every value exactly. Legend: `B` samples, `P` prompt tokens, `T`
completion tokens.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import InputError
from ..upstream.trl_compat import pad
from .policy_loss import policy_mask


@dataclass(frozen=True)
class _Field:
    """How a tensor of the batch is stored: the side and value of its padding, and the type it is kept in."""

    side: str = "right"
    padding: float = 0
    kept_as: torch.dtype | None = None
    is_column: bool = False  # shape (B, 1) holds one value per sample, not samples of one token


# What TRL pads with, by key
_FIELDS = {
    "prompt_ids": _Field("left", kept_as=torch.int32),
    "prompt_mask": _Field("left", kept_as=torch.bool),
    "completion_ids": _Field(kept_as=torch.int32),
    "completion_mask": _Field(kept_as=torch.bool),
    "tool_mask": _Field(padding=1, kept_as=torch.bool),
    "old_per_token_logps": _Field(),
    "sampling_per_token_logps": _Field(),
    # Far below any other: with 0, the KL term could overflow where the policy gives padding a tiny probability
    "ref_per_token_logps": _Field(padding=-1e4),
    "importance_sampling_ratio": _Field(padding=1, is_column=True),
    "advantages": _Field(),
    "policy_version": _Field(),
    "token_versions": _Field(kept_as=torch.int32),
}
_OF_THE_WHOLE_BATCH = "num_items_in_batch"
_OTHER_SETTINGS = (
    "they come from runs with different settings. If a checkpoint contained some, set `replay_discard_saved` to True."
)


def unknown_keys(batch: Mapping[str, Any]) -> list[str]:
    """Return the keys of a batch that are not TRL's for text, nor those of this package."""
    known = {*_FIELDS, "is_filler", _OF_THE_WHOLE_BATCH}
    return [key for key, value in batch.items() if value is not None and key not in known]


def padding_side(key: str, values: torch.Tensor, num_tokens: int) -> str | None:
    """
    Return the side on which TRL pads values of a batch with two dimensions, or `None` if they are not per token.

    Values of an unknown key are per token of the completion if there are as many as `num_tokens`.
    """
    field = _FIELDS.get(key)
    if field is None:
        return "right" if values.shape[1] == num_tokens else None
    return None if field.is_column and values.shape[1] == 1 else field.side


class Rows:
    """
    Samples without padding, on the CPU: for each key, the values of one sample after the other.

    `values` have shape `(sum of lengths,)`, or `(B, 1)` for one value per sample; `policy_version` is one of them.
    `lengths` has the numbers of tokens, `(B,)`, of prompts ("left") and completions ("right"), named by padding side.
    """

    def __init__(self, values: Mapping[str, torch.Tensor], lengths: Mapping[str, np.ndarray]):
        self.values = dict(values)
        self.lengths = {side: np.asarray(each, dtype=np.int64) for side, each in lengths.items()}
        self._ends = {side: np.cumsum(each) for side, each in self.lengths.items()}
        for key, tensor in self.values.items():
            if tensor.shape != ((len(self), 1) if tensor.dim() == 2 else (self.lengths[_FIELDS[key].side].sum(),)):
                raise ValueError(f"`{key}` has shape {tuple(tensor.shape)}, which does not fit {len(self)} samples")

    def __len__(self) -> int:
        return len(self.values["policy_version"])

    @property
    def policy_versions(self) -> np.ndarray:
        """Policy version of each sample, shape `(B,)`."""
        return self.values["policy_version"].squeeze(1).numpy()

    def row_bytes(self) -> np.ndarray:
        """Return the number of bytes that each sample takes, shape `(B,)`: its values and their positions."""
        places = sum(each.itemsize for each in (*self.lengths.values(), *self._ends.values()))
        row_bytes = np.full(len(self), places)
        for key, tensor in self.values.items():
            row_bytes += tensor.element_size() * (1 if tensor.dim() == 2 else self.lengths[_FIELDS[key].side])
        return row_bytes

    def has_advantage(self) -> np.ndarray:
        """Return whether each sample has a token with a nonzero advantage, shape `(B,)`."""
        return self._any_of_row(self.values["advantages"] != 0)

    def has_trained_token(self) -> np.ndarray:
        """Return whether each sample has a token of the loss, shape `(B,)`."""
        return self._any_of_row(policy_mask(self.values).bool())

    def _any_of_row(self, is_true: torch.Tensor) -> np.ndarray:
        if is_true.dim() == 2:
            return is_true.squeeze(1).numpy()
        parts = np.split(is_true.numpy(), self._ends["right"][:-1])
        return np.array([part.any() for part in parts], dtype=bool)

    def select(self, indices: Sequence[int] | np.ndarray) -> "Rows":
        """Return a copy of some samples, in the order of `indices`."""
        return concat_rows([(self, indices)])

    def masked(self) -> "Rows":
        """Return a fully masked copy of the samples, which fills a batch and has no effect on training."""
        return Rows({**self.values, "completion_mask": torch.zeros_like(self.values["completion_mask"])}, self.lengths)

    def take(self, indices: np.ndarray, keys: Collection[str]) -> dict[str, torch.Tensor]:
        """
        Return copies of the values of some samples, with defaults for the `keys` that a generation step may omit.

        Without `tool_mask`, the policy wrote all tokens. Without `sampling_per_token_logps`, the sampler's
        log-probabilities are `old_per_token_logps`, as in TRL.
        """
        values, places = dict(self.values), {}
        if "tool_mask" in keys:
            values.setdefault("tool_mask", torch.ones_like(values["completion_mask"]))
        if "sampling_per_token_logps" in keys and "old_per_token_logps" in values:
            values.setdefault("sampling_per_token_logps", values["old_per_token_logps"])
        for side, all_lengths in self.lengths.items():
            lengths, ends = all_lengths[indices], self._ends[side][indices]
            offsets = np.repeat(ends - np.cumsum(lengths), lengths)
            places[side] = torch.from_numpy(offsets + np.arange(len(offsets)))
        rows = torch.from_numpy(indices)
        return {
            key: tensor[rows if tensor.dim() == 2 else places[_FIELDS[key].side]] for key, tensor in values.items()
        }


def concat_rows(parts: Sequence[tuple[Rows, Sequence[int] | np.ndarray]]) -> Rows:
    """Concatenate samples of one or more collections: from each, copies of the samples at its indices, in order."""
    pairs = [(rows, np.asarray(indices, dtype=np.int64)) for rows, indices in parts]
    every_key = set().union(*(rows.values for rows, _ in pairs))
    taken = [rows.take(indices, every_key) for rows, indices in pairs]
    sides = pairs[0][0].lengths
    lengths = {side: np.concatenate([rows.lengths[side][indices] for rows, indices in pairs]) for side in sides}
    differing = set().union(*taken) - set(taken[0]).intersection(*taken)
    if differing:
        raise InputError(f"Only some samples have {sorted(differing)}: {_OTHER_SETTINGS}")
    joined = {}
    for key in taken[0]:
        pieces = [values[key] for values in taken]
        if any(piece.dim() == 1 for piece in pieces):
            pieces = [piece.reshape(-1) for piece in pieces]  # samples of one token may have either shape
            if sum(map(len, pieces)) != lengths[_FIELDS[key].side].sum():
                raise InputError(f"Some samples have one `{key}` per token, others one in all: {_OTHER_SETTINGS}")
        joined[key] = torch.cat(pieces)
    return Rows(joined, lengths)


def batch_to_rows(batch: Mapping[str, torch.Tensor], pad_token_id: int) -> Rows:
    """
    Split TRL's batch into samples that share no memory with it. Masked tokens at the end are kept unless padding.

    Values of the whole batch are left out.
    """
    kept = {}
    for key, tensor in batch.items():
        if key == _OF_THE_WHOLE_BATCH:
            continue
        if key not in _FIELDS:
            raise InputError(
                f"The batch has `{key}`, which the replay buffer does not support (it supports {', '.join(_FIELDS)}): "
                "turn replay off, with `replay_fraction` 0 and `replay_zero_advantage` False."
            )
        kept[key] = tensor.detach().to("cpu", _FIELDS[key].kept_as)
    prompt_mask, completion_mask = kept["prompt_mask"], kept["completion_mask"]
    places = torch.arange(completion_mask.shape[1])
    is_token = completion_mask | (kept["completion_ids"] != pad_token_id)
    is_inside = {
        "left": torch.arange(prompt_mask.shape[1]) >= prompt_mask.int().argmax(dim=1, keepdim=True),
        "right": places < (is_token * (places + 1)).amax(dim=1, keepdim=True).clamp(min=1),
    }
    values = {}
    for key, tensor in kept.items():
        is_per_row = tensor.dim() == 1 or (_FIELDS[key].is_column and tensor.shape[1] == 1)
        values[key] = tensor.reshape(-1, 1).clone() if is_per_row else tensor[is_inside[_FIELDS[key].side]]
    return Rows(values, {side: inside.sum(dim=1).numpy() for side, inside in is_inside.items()})


def rows_to_batch(
    rows: Rows, pad_token_id: int, device: torch.device | str, pad_to_multiple_of: int | None = None
) -> dict[str, torch.Tensor]:
    """Build a padded batch, as TRL would, from one or more samples."""
    batch = {}
    for key, tensor in rows.values.items():
        field = _FIELDS[key]
        if tensor.dim() == 2:
            tensor = tensor if field.is_column else tensor.squeeze(1)
        else:
            padding: Any = pad_token_id if key in ("prompt_ids", "completion_ids") else field.padding
            pieces = list(tensor.split(rows.lengths[field.side].tolist()))
            tensor = pad(pieces, padding, field.side, pad_to_multiple_of)
        batch[key] = tensor.to(device, None if field.kept_as is None else torch.int64)
    return batch


def set_num_items(batch: dict[str, torch.Tensor], num_tokens: torch.Tensor) -> None:
    """Set the number of tokens, over all ranks, that losses with a mean over a generation step divide by."""
    batch[_OF_THE_WHOLE_BATCH] = num_tokens


def mark_fillers(batch: Mapping[str, Any], num_fillers: int) -> dict[str, Any]:
    """
    Mark the last samples of TRL's batch as fillers, in `is_filler`, `(B,)`. All ranks make this call, or none.

    Fillers are fully masked copies that fill a batch up to its size. They stay in their micro-batch, because TRL
    gathers per-sample values over ranks.
    """
    num_rows = len(batch["completion_ids"])
    return {**batch, "is_filler": torch.arange(num_rows) >= num_rows - num_fillers}  # on the CPU: the host reads it


def mask_zero_advantages(batch: dict[str, torch.Tensor], is_zero: torch.Tensor) -> None:
    """Set advantages to exactly 0 where `is_zero`, which covers all samples but the fillers at the end."""
    batch["advantages"][: len(is_zero)][is_zero] = 0


def tensors_of_rows(chunks: Sequence[Rows]) -> dict[str, torch.Tensor]:
    """Return chunks of samples as named tensors, for a file."""
    tensors: dict[str, torch.Tensor] = {}
    for number, rows in enumerate(chunks):
        lengths = {side: torch.from_numpy(each) for side, each in rows.lengths.items()}
        tensors |= {f"{number}.{key}": tensor for key, tensor in {**rows.values, **lengths}.items()}
    return tensors


def rows_from_tensors(tensors: Mapping[str, Any]) -> list[Rows]:
    """Return the chunks of samples that [`tensors_of_rows`] stored; other entries are ignored."""
    chunks: dict[int, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            number, _, key = name.partition(".")
            chunks[int(number)][key] = tensor
    rows = []
    for _, values in sorted(chunks.items()):
        lengths = {side: values.pop(side).numpy() for side in ("left", "right")}
        rows.append(Rows(values, lengths))
    return rows


def attach_version(batch: dict[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
    """Return TRL's batch with the policy version that sampled it, `(B,)`."""
    ids = batch["completion_ids"]
    return {**batch, "policy_version": torch.full((len(ids),), version, device=ids.device)}


def versions_of(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the policy versions of TRL's batch: `(B,)`, or `(B, T)` if the tokens of a sample may have several."""
    return batch.get("token_versions", batch["policy_version"])


def pad_logps(logps: Sequence[Sequence[float | None]], num_tokens: int) -> torch.Tensor:
    """Return the log-probabilities of completions as `(B, num_tokens)`, padded with 0; NaN for those not known."""
    known = [[math.nan if value is None else value for value in row] for row in logps]
    return torch.tensor([[*row, *[0.0] * (num_tokens - len(row))] for row in known], dtype=torch.float32)


def pad_completions(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], pad_token_id: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return a batch of token ids and masks for a forward pass, with the keys of TRL's batch."""
    batch = {}
    for name, rows, side in (("prompt", prompts, "left"), ("completion", completions, "right")):
        ids = [torch.tensor(row) for row in rows]
        batch[f"{name}_ids"] = pad(ids, pad_token_id, side).to(device)
        batch[f"{name}_mask"] = pad([torch.ones_like(row) for row in ids], 0, side).to(device)
    return batch
