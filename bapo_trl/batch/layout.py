"""
The layout of samples in micro-batches: little padding, and no pass for samples without a gradient.

TRL pads all samples of a generation to the longest one, and keeps that width in each micro-batch. Here a micro-batch
is as wide as its own longest sample, and the samples of an update are sorted by length before they are divided into
micro-batches. The gradient of an update stays the same, up to rounding.

All functions are pure. Legend: `N` ranks, `R` samples of a pass on a rank, `B` samples of a micro-batch, `P` prompt
tokens, `T` completion tokens.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from .policy_loss import FORWARD_KEYS, policy_mask
from .samples import padding_side


LAYOUTS = ("balanced", "trimmed", "padded")

_OVER_ALL_TOKENS = ("token_type_ids", "mm_token_type_ids")  # of prompt and completion


@dataclass(frozen=True)
class MicroBatch:
    """
    A micro-batch of a pass: the samples of one rank, and numbers over all ranks.

    The numbers that begin with `trl_` are of the micro-batch that TRL has at the same position. Over the positions of
    an update, both cover the same samples, but for those that are skipped.
    """

    rows: np.ndarray  # `(B,)`, index of each sample in the pass
    is_filler: np.ndarray  # `(B,)`, samples to mask: they fill up to the number of samples of other ranks
    prompt_width: int
    completion_width: int
    factor: float  # of this rank's policy loss, with which its means have TRL's divisor
    num_rows: int  # computed, fillers included
    fillers: int  # of these
    loss_tokens: int
    counted: int  # what TRL's means over tokens divide by: it counts samples where they are one token wide
    computed: int  # positions of prompt and completion, padding included
    unpadded: int  # tokens of the computed samples
    trl_rows: int
    trl_loss_tokens: int
    trl_masked: int  # samples without a token of the loss
    trl_real: int  # samples that are no fillers of TRL's batch
    trl_filled: int  # ranks with such a sample
    skipped: int  # of these samples


def balanced(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """
    Divide samples into micro-batches of similar cost; return the indices of each micro-batch's samples.

    The cost of a micro-batch is its number of samples times the length of its longest one, in tokens (at least 1). The
    largest cost is as small as it can be. Lengths ascend, within a micro-batch and from one to the next. Only if there
    are fewer samples than `parts`, some micro-batches are empty: the first ones.

    Example:

    ```python
    >>> balanced([9, 2, 3, 2], parts=2)
    [[1, 3, 2], [0]]

    ```
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    widths = np.array([max(1, lengths[index]) for index in order])
    return [[order[index] for index in part] for part in _divide(len(order), parts, lambda start: widths[start:])]


def _divide(num_samples: int, parts: int, widths_from: Callable[[int], np.ndarray]) -> list[range]:
    """
    Divide samples, in their order, such that the largest cost of a part is as small as it can be.

    `widths_from(start)` has the width of the part from sample `start` to each later one, ascending.
    """
    empty = max(0, parts - num_samples)

    @cache
    def costs_from(start: int) -> np.ndarray:
        return widths_from(start) * np.arange(1, num_samples - start + 1)

    def ends_up_to(cost: int) -> list[int]:  # fill one part after the other; samples that are left over don't fit
        ends = [0]
        for later in reversed(range(parts - empty)):  # each later part needs a sample
            fitting = int(np.searchsorted(costs_from(ends[-1]), cost, side="right"))
            ends.append(min(ends[-1] + fitting, num_samples - later))
        return ends

    ends = [0]
    if num_samples:
        of_one_part = int(costs_from(0)[-1])
        ends = ends_up_to(bisect_left(range(of_one_part), True, key=lambda cost: ends_up_to(cost)[-1] == num_samples))
    return [range(0)] * empty + [range(*each) for each in pairwise(ends)]


def _divide_like_trl(widths: np.ndarray, parts: int, trl_widths: np.ndarray) -> list[range]:
    """
    Divide samples, in their order, into micro-batches that all are small in relation to TRL's.

    `widths` has those of prompt and completion of each sample on each rank, `(R, N, 2)`, `trl_widths` those that TRL
    pads to, `(N, 2)`. The cost is the number of samples times the width (memory and time of the layers), or times the
    width of the completions (memory of the logits), whichever is larger in relation to TRL's. In TRL's numbers of
    samples, no cost is above TRL's, so none is here.
    """
    trl_width, trl_tokens = trl_widths.sum(axis=1).max(), trl_widths[:, 1].max()

    def widths_from(start: int) -> np.ndarray:
        widest = np.maximum.accumulate(widths[start:], axis=0)
        tokens = widest[..., 1].clip(min(2, trl_tokens))  # fillers are two tokens wide
        return np.maximum((widest[..., 0] + tokens) * trl_tokens, tokens * trl_width).max(axis=1)

    return _divide(len(widths), parts, widths_from)


def update_starts(begin: int, count: int, window: int, size: int, num_passes: int) -> list[int]:
    """
    Return the positions in a pass at which an update begins in one of the passes over a generation; 0 comes first.

    The current update has `count` micro-batches and begins with micro-batch `begin` of the generation (below 0 if it
    began in an earlier one). Later updates have `window` micro-batches. A pass has `size`. No arrangement moves a
    sample over one of these positions, so an update keeps its samples, whichever pass it is in.
    """
    earlier = range(begin, -1, -window)  # of a run that was resumed within the generation
    later = range(begin + count, size * num_passes, window)
    return sorted({0, *(place % size for place in (*earlier, *later))})


def measure(batch: Mapping[str, Any], keeps_prompt_padding: bool = False) -> torch.Tensor:
    """
    Return what the layout depends on for each sample of TRL's batch, integers of shape `(B, 8)`.

    Columns: width of the prompt; width of the completion; number of tokens; number of tokens of the loss; whether the
    sample is no filler; whether it has a token of the loss with an advantage other than 0; widths of all prompts and
    of all completions in the batch.
    """
    prompt_mask, completion_mask, mask = batch["prompt_mask"], batch["completion_mask"], policy_mask(batch)
    (num_rows, prompt_width), completion_width = prompt_mask.shape, completion_mask.shape[1]
    device, advantages = mask.device, batch["advantages"]
    from_right = torch.arange(prompt_width, 0, -1, device=device)
    from_left = torch.arange(1, completion_width + 1, device=device)
    is_real = ~batch["is_filler"].to(device) if "is_filler" in batch else mask.new_ones(num_rows)
    has_gradient = (mask.bool() & (advantages if advantages.dim() == 2 else advantages.unsqueeze(1)).ne(0)).any(dim=1)
    columns = (
        mask.new_full((num_rows,), prompt_width) if keeps_prompt_padding else (prompt_mask * from_right).amax(dim=1),
        (completion_mask * from_left).amax(dim=1),
        prompt_mask.sum(dim=1) + completion_mask.sum(dim=1),
        mask.sum(dim=1),
        is_real,
        has_gradient,
        mask.new_full((num_rows,), prompt_width),
        mask.new_full((num_rows,), completion_width),
    )
    return torch.stack([column.long() for column in columns], dim=1)


def plan(
    measures: np.ndarray,
    rank: int,
    starts: Sequence[int],
    size: int,
    *,
    layout: str = "balanced",
    skips: bool = True,
    mean_over: str = "generation",
    multiple: int = 1,
) -> list[MicroBatch]:
    """
    Return the micro-batches of a pass on one rank. All ranks have the same number of samples in a micro-batch.

    Args:
        measures (`np.ndarray`): Result of [`measure`] for the samples of the pass, `(N, R, 8)`.
        rank (`int`): Rank whose micro-batches are returned.
        starts (`Sequence[int]`): Positions in the pass at which an update begins, see [`update_starts`].
        size (`int`): Number of samples in each of TRL's micro-batches.
        layout (`str`): `"balanced"` sorts the samples of an update by length and divides them, `"trimmed"` makes TRL's
            micro-batches narrower, `"padded"` keeps them as they are.
        skips (`bool`): Whether samples without a gradient are left out. An empty micro-batch gets one masked sample.
        mean_over (`str`): What the loss is a mean over, see [`~batch.losses.Loss`].
        multiple (`int`): Number of which the widths are made a multiple.
    """
    columns = np.moveaxis(measures, 2, 0)
    loss_tokens, is_real, has_gradient = columns[3:6]  # (N, R) each
    is_kept = np.ones_like(is_real)
    if layout != "padded" and (skips or layout == "balanced"):
        is_kept = has_gradient if skips else is_real
    all_widths = -(-measures[..., :2].clip(1) // multiple) * multiple * is_kept[..., None]  # (N, R, 2)
    trl_widths = measures[:, 0, 6:]  # (N, 2)
    least_tokens = trl_widths[:, 1].clip(max=2)
    micro_batches = []
    for place, rows in enumerate(_assign(all_widths, trl_widths, starts, size, layout == "balanced")):
        of_trl = slice(place * size, (place + 1) * size)
        is_filler, num_rows = np.take_along_axis(is_kept, rows, axis=1) == 0, rows.shape[1]
        kept = np.where(is_filler, 0, np.take_along_axis(columns, rows[None], axis=2))  # (8, N, B)
        widths = np.take_along_axis(all_widths, rows[..., None], axis=1).max(axis=1).clip(multiple)  # (N, 2)
        # In TRL's means over tokens, a completion that is one token wide counts also where it is masked
        widths[:, 1] = widths[:, 1].clip(np.where((kept[3] == 0).any(axis=1), least_tokens, 1))
        kept_tokens, trl_tokens = kept[3].sum(axis=1), loss_tokens[:, of_trl].sum(axis=1)  # (N,)
        factors = {"samples": num_rows / size, "tokens": kept_tokens[rank] / max(1, trl_tokens[rank])}
        micro_batches.append(
            MicroBatch(
                rows[rank],
                is_filler[rank],
                prompt_width=int(widths[rank, 0]),
                completion_width=int(widths[rank, 1]),
                factor=1.0 if layout == "padded" else float(factors.get(mean_over, 1)),
                num_rows=rows.size,
                fillers=int(is_filler.sum()),
                loss_tokens=int(kept_tokens.sum()),
                counted=int(np.where(widths[:, 1] == 1, num_rows, kept_tokens).sum()),
                computed=int(num_rows * (trl_widths if layout == "padded" else widths).sum()),
                unpadded=int(kept[2].sum()),
                trl_rows=is_real[:, of_trl].size,
                trl_loss_tokens=int(trl_tokens.sum()),
                trl_masked=int((loss_tokens[:, of_trl] == 0).sum()),
                trl_real=int(is_real[:, of_trl].sum()),
                trl_filled=int(is_real[:, of_trl].any(axis=1).sum()),
                skipped=int((is_real - is_kept)[:, of_trl].clip(0).sum()),
            )
        )
    return micro_batches


def _assign(
    widths: np.ndarray, trl_widths: np.ndarray, starts: Sequence[int], size: int, is_balanced: bool
) -> Iterator[np.ndarray]:
    """
    Yield the samples of each micro-batch, `(N, B)`, by index in the pass.

    The widths of prompt and completion are `(N, R, 2)`, 0 for samples that are left out: where another rank has more
    samples, they fill up.
    """
    num_places = widths.shape[1] // size
    bounds = [*starts, num_places] if is_balanced else [*range(num_places + 1)]
    for start, end in pairwise(bounds):
        own = widths[:, start * size : end * size]
        order = np.argsort(own.sum(axis=2), axis=1, kind="stable")
        ascending = np.take_along_axis(own, order[..., None], axis=1).swapaxes(0, 1)  # (R, N, 2)
        used = np.flatnonzero(ascending.any(axis=(1, 2)))
        for part in _divide_like_trl(ascending[used], end - start, trl_widths):
            rows = start * size + order[:, used[part] if part else slice(1)]
            yield rows if is_balanced else np.sort(rows, axis=1)


def lay_out(
    micro_batches: Sequence[Mapping[str, Any]], planned: Sequence[MicroBatch], starts: Sequence[int]
) -> list[dict[str, Any]]:
    """
    Return the planned micro-batches of a pass, made from those of TRL.

    `starts` are the positions between which samples may change places. Fillers are masked, and marked in `is_filler`.
    """
    laid_out = []
    for start, end in zip(starts, [*starts[1:], len(planned)], strict=True):
        joined = _concat(micro_batches[start:end])
        first = sum(len(each["completion_ids"]) for each in micro_batches[:start])
        laid_out += [_take(joined, each, first) for each in planned[start:end]]
    return laid_out


def _concat(micro_batches: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Concatenate micro-batches of the same width along the first dimension."""
    if len(micro_batches) == 1:
        return micro_batches[0]
    return {
        key: torch.cat([each[key] for each in micro_batches]) if _has_rows(value) else value
        for key, value in micro_batches[0].items()
    }


def _has_rows(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _take(batch: Mapping[str, Any], planned: MicroBatch, first: int) -> dict[str, Any]:
    """Return a planned micro-batch from a batch whose first sample has the index `first` in the pass."""
    num_rows, num_tokens = batch["completion_ids"].shape
    rows, is_filler = torch.from_numpy(planned.rows - first), torch.from_numpy(planned.is_filler)
    keeps_rows = len(rows) == num_rows and bool((rows == torch.arange(num_rows)).all())
    left, right = planned.prompt_width, planned.completion_width
    taken = dict(batch)
    for key, value in batch.items():
        if not _has_rows(value):
            continue
        if not keeps_rows:
            value = value[rows.to(value.device)]
        if key in _OVER_ALL_TOKENS:
            begin = value.shape[1] - num_tokens - left
            value = value[:, begin : begin + left + right]
        elif value.dim() > 1 and key not in FORWARD_KEYS:  # those are of images
            side = padding_side(key, value, num_tokens)
            value = value[:, -left:] if side == "left" else value[:, :right] if side == "right" else value
        taken[key] = value
    if is_filler.any():
        for key, value in (("completion_mask", 0), ("importance_sampling_ratio", 1)):
            if taken.get(key) is not None:
                taken[key] = taken[key].masked_fill(is_filler.to(taken[key].device).unsqueeze(1), value)
        taken["is_filler"] = is_filler | taken.get("is_filler", torch.zeros_like(is_filler))
    return taken


@dataclass(frozen=True)
class Chunk:
    """Samples that are scored in one forward pass."""

    rows: torch.Tensor  # indices of the samples, on the device of their tokens
    columns: slice  # of prompt and completion, without the padding that all of them have
    completion_width: int


def scoring_chunks(
    attention_mask: torch.Tensor,
    num_tokens: int,
    size: int,
    layout: str = "balanced",
    keeps_prompt_padding: bool = False,
    multiple: int = 1,
) -> list[Chunk]:
    """
    Divide samples into as many forward passes as TRL makes, to score their log-probabilities.

    `attention_mask` is that of prompt and completion, `(B, P + T)`, the latter of `num_tokens`; `size` the number of
    samples in each of TRL's passes. The other arguments are those of [`plan`] and [`measure`].
    """
    prompt_width = attention_mask.shape[1] - num_tokens
    empty = attention_mask.new_zeros(attention_mask.shape[0], 1)
    batch = {
        "prompt_mask": attention_mask[:, :prompt_width],
        "completion_mask": attention_mask[:, prompt_width:],
        "advantages": empty,
    }
    widths = measure(batch, keeps_prompt_padding)[:, :2].clamp(min=1).cpu().numpy()
    widths = -(-widths // multiple) * multiple  # (B, 2)
    order, num_rows = np.arange(len(widths)), len(widths)
    parts = [range(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]
    if layout == "balanced":
        order = np.argsort(widths.sum(axis=1), kind="stable")
        parts = _divide_like_trl(widths[order, None], len(parts), np.array([[prompt_width, num_tokens]]))
    chunks = []
    for part in parts:
        rows = order[part]
        left, right = widths[rows].max(axis=0).tolist()
        columns = slice(max(0, prompt_width - left), prompt_width + right)
        chunks.append(Chunk(torch.from_numpy(rows).to(attention_mask.device), columns, min(right, num_tokens)))
    return chunks
