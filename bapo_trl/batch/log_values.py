"""
The values of a log line.

TRL collects the values of each metric from one log line to the next, and logs their mean. NaN stands for an undefined
value, which the mean skips.
"""

import math
from collections.abc import Mapping, MutableMapping


LARGEST = ("ratio/max", "staleness/max", "partial/segments_max", "sampling/raw_importance_sampling_ratio/max")
"""Metrics of this package that are a maximum over ranks, micro-batches, updates and the window of a log line."""

SMALLEST = ("ratio/min", "sampling/raw_importance_sampling_ratio/min")
"""Metrics of this package that are a minimum over ranks, micro-batches, updates and the window of a log line."""


def add_values(metrics: MutableMapping[str, list[float]], values: Mapping[str, float]) -> None:
    """Add a value to each of TRL's metrics, in its `_metrics["train"]` or `_metrics["eval"]`."""
    for name, value in values.items():
        metrics[name].append(value)


def reduce_window(values: MutableMapping[str, list[float]]) -> None:
    """Reduce each maximum and each minimum to one value, and remove metrics whose values are all undefined."""
    for name in list(values):
        defined = [value for value in values[name] if not math.isnan(value)]
        if not defined:
            del values[name]
        elif name in LARGEST:
            values[name] = [max(defined)]
        elif name in SMALLEST:
            values[name] = [min(defined)]
