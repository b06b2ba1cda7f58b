"""Cut TRL's padded batch into samples and put samples together again: the only code that pads, cuts or merges batches.

A row holds the values of one sample without padding, on the CPU, token ids and masks in the smallest type that keeps
their values. Cutting and putting together again gives every value back, bit for bit. Legend: `B` rows, `P` prompt
tokens, `T` completion tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from ..errors import InputError
from .keys import FORWARD_KEYS
from .policy_loss import policy_mask


@dataclass(frozen=True)
class _Field:
    """How a tensor of the batch is cut: along which side it is padded, with what, and in which type it is kept."""

    side: str | None  # side of the padding; `None` for one value a row
    padding: float = 0
    kept_as: torch.dtype | None = None
    may_be_per_row: bool = False  # shape (B, 1) holds one value a row, not rows of one token


# What TRL pads with, by key. Prompts are padded on the left, completions on the right.
_FIELDS = {
    "prompt_ids": _Field("left", kept_as=torch.int32),
    "prompt_mask": _Field("left", kept_as=torch.bool),
    "completion_ids": _Field("right", kept_as=torch.int32),
    "completion_mask": _Field("right", kept_as=torch.bool),
    "tool_mask": _Field("right", padding=1, kept_as=torch.bool),
    "old_per_token_logps": _Field("right"),
    "sampling_per_token_logps": _Field("right"),
    # Far below any other: with 0, the KL term could overflow where the policy is sure that there is no padding
    "ref_per_token_logps": _Field("right", padding=-1e4),
    "importance_sampling_ratio": _Field("right", padding=1, may_be_per_row=True),
    "advantages": _Field("right"),
    "policy_version": _Field(None),
    "token_versions": _Field("right", kept_as=torch.int32),
}
_PER_BATCH = ("num_items_in_batch",)
_OTHER_SETTINGS = (
    "they come from runs with different settings. If a checkpoint brought the other ones, set `replay_discard_saved`."
)


class Spans:
    """Where each row's values lie in a column, by their number. Columns of the same lengths share one."""

    def __init__(self, lengths: Sequence[int] | np.ndarray):
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.ends = np.cumsum(self.lengths)

    @property
    def row_bytes(self) -> int:
        """Bytes that a row takes here."""
        return self.lengths.itemsize + self.ends.itemsize


class Column:
    """
    The values of one key, of all rows, one row after the other: `(sum(lengths),)` with spans, which have the number of
    values of each row; without, of one value a row, `(B,)` or `(B, 1)`.
    """

    def __init__(self, values: torch.Tensor, spans: Spans | Sequence[int] | None = None):
        self.values = values
        self.spans = spans if spans is None or isinstance(spans, Spans) else Spans(spans)
        if self.spans is not None and (
            self.spans.lengths.sum() != len(values) or (self.spans.lengths < 0).any() or values.dim() != 1
        ):
            raise ValueError(f"{tuple(values.shape)} values do not make rows of {self.spans.lengths.sum()} values")

    @property
    def lengths(self) -> np.ndarray | None:
        """Number of values of each row; `None` for one value a row."""
        return None if self.spans is None else self.spans.lengths

    def __len__(self) -> int:
        return len(self.values) if self.lengths is None else len(self.lengths)

    def pieces(self, indices: Sequence[int] | np.ndarray) -> list[torch.Tensor]:
        """Return views of the values of some rows, one a row."""
        if self.lengths is None:
            return [self.values.narrow(0, index, 1) for index in np.asarray(indices).tolist()]
        lengths = self.lengths[indices]
        starts = self.spans.ends[indices] - lengths
        return [self.values.narrow(0, *place) for place in zip(starts.tolist(), lengths.tolist(), strict=True)]

    def any_of_row(self) -> np.ndarray:
        """Return whether any value of a row is true, shape `(B,)`."""
        values = self.values.numpy()
        if self.lengths is None:
            return values
        return np.array([part.any() for part in np.split(values, self.spans.ends[:-1])], dtype=bool)

    def row_bytes(self) -> np.ndarray:
        """Return the number of bytes of each row, shape `(B,)`."""
        lengths = np.ones(len(self), dtype=np.int64) if self.lengths is None else self.lengths
        return lengths * self.values.element_size()


class Rows:
    """Samples without padding: columns of the same number of rows by key, `policy_version` among them."""

    def __init__(self, columns: Mapping[str, Column]):
        unknown = sorted(set(columns) - set(_FIELDS))
        sizes = {key: len(column) for key, column in columns.items()}
        if unknown or len(set(sizes.values())) > 1:
            raise ValueError(f"columns of {sizes} rows, of which {unknown} are not known, do not go together")
        self.columns = dict(columns)

    def __len__(self) -> int:
        return len(self.columns["policy_version"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return the values of one row by key: of shape `(length,)`, or `()` or `(1,)` for one value a row."""
        return {
            key: column.values[index] if column.lengths is None else column.pieces([index])[0]
            for key, column in self.columns.items()
        }

    @property
    def policy_versions(self) -> np.ndarray:
        """Policy version that sampled each row, shape `(B,)`."""
        return self.columns["policy_version"].values.numpy()

    @property
    def has_token_versions(self) -> bool:
        """Whether each token has a policy version of its own."""
        return "token_versions" in self.columns

    def row_bytes(self) -> np.ndarray:
        """Return the number of bytes that each row takes, shape `(B,)`: its values, and where they lie."""
        spans = {id(column.spans): column.spans for column in self.columns.values() if column.spans is not None}
        values = np.sum([column.row_bytes() for column in self.columns.values()], axis=0)
        return values + sum(span.row_bytes for span in spans.values())

    def has_advantage(self) -> np.ndarray:
        """Return whether a row has an advantage other than 0, for any of its tokens; shape `(B,)`."""
        column = self.columns["advantages"]
        return Column(column.values != 0, column.spans).any_of_row()

    def has_trained_token(self) -> np.ndarray:
        """Return whether the loss counts a token of a row; shape `(B,)`."""
        mask = policy_mask({key: column.values for key, column in self.columns.items()})
        return Column(mask.bool(), self.columns["completion_mask"].spans).any_of_row()

    def select(self, indices: Sequence[int] | np.ndarray) -> "Rows":
        """Return a copy of some rows, in the order of `indices`."""
        return concat_rows([(self, indices)])

    def with_defaults(self, keys: Iterable[str]) -> "Rows":
        """
        Return the rows with those of `keys` that a generation may leave out.

        Without `tool_mask`, the policy wrote all tokens; without `sampling_per_token_logps`, the sampler's are
        `old_per_token_logps`, as for TRL.
        """
        columns, missing = dict(self.columns), set(keys) - self.columns.keys()
        if "tool_mask" in missing:
            mask = columns["completion_mask"]
            columns["tool_mask"] = Column(torch.ones_like(mask.values), mask.spans)
        if "sampling_per_token_logps" in missing and "old_per_token_logps" in columns:
            columns["sampling_per_token_logps"] = columns["old_per_token_logps"]
        return Rows(columns) if len(columns) > len(self.columns) else self

    def masked(self) -> "Rows":
        """Return the rows with no token that counts: they keep the shape of a batch and train nothing."""
        mask = self.columns["completion_mask"]
        return Rows({**self.columns, "completion_mask": Column(torch.zeros_like(mask.values), mask.spans)})


def concat_rows(parts: Iterable[tuple[Rows, Sequence[int] | np.ndarray]]) -> Rows:
    """
    Copy rows of several collections, at least one, into one: those at the indices beside each, in their order.

    What some have and others may leave out has its default for these.
    """
    parts = [(rows, np.asarray(indices, dtype=np.int64)) for rows, indices in parts]
    every_key = set().union(*(rows.columns for rows, _ in parts))
    parts = [(rows.with_defaults(every_key), indices) for rows, indices in parts]
    keys = parts[0][0].columns.keys()
    for rows, _ in parts:
        if rows.columns.keys() != keys:
            raise InputError(f"The rows differ in {sorted(keys ^ rows.columns.keys())}: {_OTHER_SETTINGS}")
    columns = {}
    shared: dict[str, Spans] = {}  # by the side of the padding: prompts and completions
    for key in keys:
        sources = [(rows.columns[key], indices) for rows, indices in parts]
        pieces = [piece for column, indices in sources for piece in column.pieces(indices)]
        empty = sources[0][0].values[:0].clone()
        if all(column.lengths is None for column, _ in sources):
            columns[key] = Column(torch.cat(pieces) if pieces else empty)
            continue
        pieces = [piece.reshape(-1) for piece in pieces]  # rows of one token may hold it either way
        lengths = np.array([len(piece) for piece in pieces], dtype=np.int64)
        spans = shared.setdefault(_FIELDS[key].side, Spans(lengths))
        if not np.array_equal(spans.lengths, lengths):
            raise InputError(f"Some rows have one `{key}` for each token, others one for all: {_OTHER_SETTINGS}")
        columns[key] = Column(torch.cat(pieces) if pieces else empty.reshape(-1), spans)
    return Rows(columns)


def batch_to_rows(
    batch: Mapping[str, torch.Tensor], pad_token_id: int, versions: Mapping[str, torch.Tensor] | None = None
) -> Rows:
    """
    Cut a padded batch into rows. `versions` are its policy versions on the CPU: nothing waits for the device.

    The batch is TRL's: `prompt_ids` `(B, P)`, `completion_ids` `(B, T)`, their masks, and whatever else TRL puts in,
    tensors of shape `(B, T)`, `(B, 1)` or `(B,)`. Values of the whole batch (`num_items_in_batch`) are left out: they
    have to be computed anew for each batch. Masked tokens at the end that are not padding are kept. The `B` rows share
    no memory with the batch.
    """
    for key in batch:
        if key in FORWARD_KEYS:
            raise InputError(
                f"The batch has `{key}`: multimodal samples cannot be replayed. Set `replay_fraction` to 0 and "
                "`replay_zero_advantage` to False."
            )
        if key not in _FIELDS and key not in _PER_BATCH:
            raise InputError(f"The batch has `{key}`, which cannot be cut into rows: known are {', '.join(_FIELDS)}.")

    kept, batch = {}, {**batch, **(versions or {})}
    for key, field in _FIELDS.items():
        if key in batch:
            tensor = batch[key].detach().cpu()
            kept[key] = tensor if field.kept_as is None else tensor.to(field.kept_as)
    prompt_length, completion_length = kept["prompt_mask"].shape[1], kept["completion_mask"].shape[1]
    prompt_starts = kept["prompt_mask"].int().argmax(dim=1)
    is_token = kept["completion_mask"] | (kept["completion_ids"] != pad_token_id)
    completion_ends = (is_token * torch.arange(1, completion_length + 1)).amax(dim=1).clamp(min=1)

    spans = {"left": Spans((prompt_length - prompt_starts).numpy()), "right": Spans(completion_ends.numpy())}
    places = {
        "left": [slice(start, None) for start in prompt_starts.tolist()],
        "right": [slice(end) for end in completion_ends.tolist()],
    }
    columns = {}
    for key, tensor in kept.items():
        field = _FIELDS[key]
        is_per_row = tensor.dim() == 1 or (field.may_be_per_row and tensor.shape[1] == 1)
        if is_per_row:
            columns[key] = Column(tensor.clone())
        else:
            pieces = [row[place] for row, place in zip(tensor, places[field.side], strict=True)]
            columns[key] = Column(torch.cat(pieces), spans[field.side])
    return Rows(columns)


def rows_to_batch(
    rows: Rows, pad_token_id: int, device: torch.device | str, pad_to_multiple_of: int | None = None
) -> dict[str, torch.Tensor]:
    """
    Put rows, at least one, together into a padded batch, as TRL would have made it.

    Values of the whole batch, such as `num_items_in_batch`, are left out.
    """
    batch = {}
    for key, column in rows.columns.items():
        field = _FIELDS[key]
        if column.lengths is None:
            tensor = column.values
        else:
            padding = pad_token_id if key in ("prompt_ids", "completion_ids") else field.padding
            tensor = _pad(column, padding, field.side, pad_to_multiple_of)
        if field.kept_as is not None:
            tensor = tensor.to(torch.int64)
        batch[key] = tensor.to(device)
    return batch


def _pad(column: Column, padding: float, side: str, multiple: int | None) -> torch.Tensor:
    pieces = list(column.values.split(column.lengths.tolist()))
    padded = pad_sequence(pieces, batch_first=True, padding_value=padding, padding_side=side)
    excess = 0 if multiple is None else -padded.shape[1] % multiple
    return torch.nn.functional.pad(padded, (excess, 0) if side == "left" else (0, excess), value=padding)


def set_num_items(batch: dict[str, torch.Tensor], num_tokens: torch.Tensor) -> None:
    """Have losses that divide by the tokens of a generation, on all ranks, divide by these."""
    batch["num_items_in_batch"] = num_tokens


def mask_zero_advantages(batch: dict[str, torch.Tensor], is_zero: torch.Tensor) -> None:
    """Set the advantages of some of the first samples to exactly 0; what follows them are fillers."""
    batch["advantages"][: len(is_zero)][is_zero] = 0


def tensors_of_rows(chunks: Sequence[Rows]) -> dict[str, torch.Tensor]:
    """Return the values of rows, in chunks, as tensors by name: for a file."""
    tensors = {}
    for number, rows in enumerate(chunks):
        for key, column in rows.columns.items():
            tensors[f"{number}.{key}"] = column.values
            if column.lengths is not None:
                tensors[f"{number}.{key}.lengths"] = torch.tensor(column.lengths)  # a copy: columns share theirs
    return tensors


def rows_from_tensors(tensors: Mapping[str, Any]) -> list[Rows]:
    """Return the chunks of rows that [`tensors_of_rows`] gave, whatever else is beside them."""
    columns: dict[int, dict[str, Column]] = {}
    for name, values in tensors.items():
        number, _, key = name.partition(".")
        if not isinstance(values, torch.Tensor) or key.endswith(".lengths"):
            continue
        chunk = columns.setdefault(int(number), {})
        spans = None
        if f"{name}.lengths" in tensors:
            spans = Spans(tensors[f"{name}.lengths"].numpy())
            for other in chunk.values():  # columns of the same lengths share them
                if other.spans is not None and np.array_equal(other.lengths, spans.lengths):
                    spans = other.spans
        chunk[key] = Column(values, spans)
    return [Rows(columns[number]) for number in sorted(columns)]


def attach_version(batch: dict[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
    """Add the policy version that sampled all of TRL's batch, `(B,)`; return the same on the CPU."""
    ids = batch["completion_ids"]
    batch["policy_version"] = torch.full((len(ids),), version, device=ids.device)
    return {"policy_version": torch.full((len(ids),), version)}


def attach_rollouts(
    batch: dict[str, Any], logps: Sequence[Sequence[float]], versions: Sequence[Sequence[int]], num_rows: int
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """
    Add to TRL's batch what TRL does not know of its samples, and fill the batch up to `num_rows`.

    Log-probabilities and policy versions are those of each token. Filler samples repeat others, with no token that
    counts. Returns the batch, with the oldest version of each sample and those of its tokens, and these on the CPU.
    """
    device, num_tokens = batch["completion_ids"].device, batch["completion_ids"].size(1)
    batch["old_per_token_logps"] = pad_logps(logps, num_tokens).to(device)
    on_cpu = {
        "policy_version": torch.tensor([row[0] for row in versions]),
        "token_versions": torch.tensor([[*row, *row[-1:] * (num_tokens - len(row))] for row in versions]),
    }
    batch |= {key: value.to(device) for key, value in on_cpu.items()}
    present = len(versions)
    rows = torch.arange(num_rows) % present
    filled = {
        key: value[rows.to(value.device)] if isinstance(value, torch.Tensor) and value.dim() else value
        for key, value in batch.items()
    }
    filled["completion_mask"] = filled["completion_mask"].clone()
    filled["completion_mask"][present:] = 0
    return filled, {key: value[rows] for key, value in on_cpu.items()}


def versions_of(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the policy versions that sampled TRL's batch: `(B,)`, or `(B, T)` where its tokens have several."""
    return batch.get("token_versions", batch["policy_version"])


def pad_logps(logps: Sequence[Sequence[float]], num_tokens: int) -> torch.Tensor:
    """Return log-probabilities of completions as `(B, num_tokens)`, padded with 0."""
    return torch.tensor([[*row, *[0.0] * (num_tokens - len(row))] for row in logps], dtype=torch.float32)


def pad_completions(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], pad_token_id: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return a batch of token ids and masks, to be scored: what of TRL's batch a forward pass reads."""
    batch = {}
    for name, rows, side in (("prompt", prompts, "left"), ("completion", completions, "right")):
        ids = [torch.tensor(row) for row in rows]
        for key, values, padding in (("ids", ids, pad_token_id), ("mask", [torch.ones_like(row) for row in ids], 0)):
            padded = pad_sequence(values, batch_first=True, padding_value=padding, padding_side=side)
            batch[f"{name}_{key}"] = padded.to(device)
    return batch
