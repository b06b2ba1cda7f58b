"""What is drawn of a metric, as pure functions: the mean of the seeds and their range, thinned to what can be seen."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .logs import Points


PARTS = 400
"""A panel is about so many pixels wide. Of each such part of a longer curve, only its ends and extremes are drawn."""

MOST_POINTS = 6 * PARTS
"""Curves of at most so many points are drawn whole."""


class Curve(NamedTuple):
    """The mean of some runs at each update that one of them logged, and its range; NaN where it is undefined."""

    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def curve_of(columns: Sequence[Points]) -> Curve:
    """Return mean and range of the runs that have a value at an update, by the points of each run."""
    steps = np.sort(np.concatenate([column.steps for column in columns]))  # np.unique takes ten times as long
    steps = steps[np.diff(steps, prepend=-1) > 0]
    total, count = np.zeros(len(steps)), np.zeros(len(steps))
    low, high = np.full(len(steps), np.nan), np.full(len(steps), np.nan)
    for column in columns:
        places = np.searchsorted(steps, column.steps)  # none twice: steps of a run ascend
        total[places] += np.nan_to_num(column.values)
        count[places] += np.isfinite(column.values)
        low[places] = np.fmin(low[places], column.values)
        high[places] = np.fmax(high[places], column.values)
    mean = np.divide(total, count, out=np.full(len(steps), np.nan), where=count > 0)
    return Curve(steps, mean, low, high)


def thinned(curve: Curve) -> Curve:
    """
    Return the curve with at most [`MOST_POINTS`] points: of each of [`PARTS`] parts the first and the last value, the
    smallest and the largest mean, and the ends of the range. A part without a value leaves a gap.
    """
    if len(curve.steps) <= MOST_POINTS:
        return curve
    kept: set[int] = set()
    for part in np.array_split(np.arange(len(curve.steps)), PARTS):
        defined = part[np.isfinite(curve.mean[part])]
        if not len(defined):
            kept.add(int(part[0]))
            continue
        mean = curve.mean[defined]
        extremes = (0, -1, mean.argmin(), mean.argmax(), curve.low[defined].argmin(), curve.high[defined].argmax())
        kept.update(int(defined[place]) for place in extremes)
    places = sorted(kept)
    return Curve(*(values[places] for values in curve))
