"""TRL's metrics of an update: means over all its tokens, whatever micro-batches its samples are computed in."""

import math
from collections.abc import Collection, MutableMapping, Sequence

from .layout import MicroBatch


OF_TOKENS = (
    "entropy", "kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "clip_ratio/low_min",
    "clip_ratio/high_max", "cispo_clip_ratio", "vespo/phi_seq_mean",
)  # fmt: skip
"""Metrics that TRL computes over the tokens of each micro-batch, as 0 if there are none."""


def average_update(
    values: MutableMapping[str, list[float]],
    update: Sequence[MicroBatch],
    of_samples: Collection[str],
    is_padded: bool,
) -> None:
    """
    Replace TRL's values of an update's micro-batches by one value for all tokens of the update.

    Skipped samples count as not clipped; the means of other metrics are over the samples that are computed. TRL's
    values are means over tokens, for the metrics `of_samples` over samples. With `is_padded`, they stay as they are,
    but undefined (NaN) for micro-batches without a token of the loss.
    """
    for name in OF_TOKENS:
        latest = values.get(name, [])[-len(update) :]
        if latest:
            micro_batches = update[-len(latest) :]  # a log line within the update took the values before
            known = [
                value if each.loss_tokens else math.nan for value, each in zip(latest, micro_batches, strict=True)
            ]
            if not is_padded:
                known = [_of_update(name, known, micro_batches, name in of_samples)]
            values[name][-len(latest) :] = known


def _of_update(name: str, values: Sequence[float], update: Sequence[MicroBatch], is_of_samples: bool) -> float:
    known = [(value, each) for value, each in zip(values, update, strict=True) if not math.isnan(value)]
    counts_all = "clip" in name  # a sample without a gradient is not clipped
    if name.endswith(("_min", "_max")):
        has_skipped = sum(each.trl_loss_tokens for each in update) > sum(each.loss_tokens for each in update)
        extremes = [value for value, _ in known] + [0.0] * has_skipped
        return (min if name.endswith("_min") else max)(extremes, default=math.nan)
    if is_of_samples:
        of_fillers = 0 if counts_all else sum(each.fillers for _, each in known)  # of weight 1, and not clipped
        total = sum(value * each.num_rows for value, each in known) - of_fillers
        count = sum(each.trl_rows if counts_all else each.num_rows - each.fillers for each in update)
    else:
        total = sum(value * each.counted for value, each in known)
        count = sum(each.trl_loss_tokens if counts_all else each.loss_tokens for each in update)
    return total / count if count and (known or counts_all) else math.nan
