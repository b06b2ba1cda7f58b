"""What a line of the log says of the updates that it covers.

TRL collects the values of each metric from one line to the next, and logs their mean. NaN stands for an undefined
value, which the mean leaves out. The functions here change these lists before TRL reads them. Pure.
"""

import math
from collections.abc import MutableMapping, Sequence


LARGEST = ("ratio/max", "staleness/max", "partial/segments_max", "sampling/raw_importance_sampling_ratio/max")
"""Metrics of this package that are a maximum, over ranks, micro-batches, updates and the window of a log line."""

SMALLEST = ("ratio/min", "sampling/raw_importance_sampling_ratio/min")
"""Metrics that are a minimum, over the same."""

OF_TOKENS = (
    "entropy", "kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "clip_ratio/low_min",
    "clip_ratio/high_max", "cispo_clip_ratio", "vespo/phi_seq_mean",
)  # fmt: skip
"""Metrics that TRL measures over the tokens of each micro-batch, as 0 where there is none."""

Values = MutableMapping[str, list[float]]


def leave_out_empty(values: Values, have_tokens: Sequence[bool]) -> None:
    """Make [`OF_TOKENS`] undefined for those of the latest micro-batches without a token of the loss on any rank."""
    count = len(have_tokens)
    for name in OF_TOKENS:
        if name in values:
            latest = zip(values[name][-count:], have_tokens, strict=True)
            values[name][-count:] = [value if has_token else math.nan for value, has_token in latest]


def reduce_window(values: Values) -> None:
    """Reduce each maximum and each minimum to one value, and remove the metrics that are undefined throughout."""
    for name in list(values):
        defined = [value for value in values[name] if not math.isnan(value)]
        if not defined:
            del values[name]
        elif name in LARGEST:
            values[name] = [max(defined)]
        elif name in SMALLEST:
            values[name] = [min(defined)]
