"""The logs of a run as columns of numbers, a million of them in a few hundred megabytes; curves of several runs."""

import math
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeGuard

import numpy as np


_UNDEFINED, _NOT_LOGGED = math.nan, math.inf

PARTS = 400
"""A panel is about so many pixels wide. Of each such part of a longer curve, only its ends and extremes are drawn."""

MOST_POINTS = 6 * PARTS
"""Curves of at most so many points are drawn whole."""


class Points(NamedTuple):
    """Updates, and the values of a metric at them: arrays of one length, in the order of the updates."""

    steps: np.ndarray
    values: np.ndarray


class Logs:
    """
    Logs of updates: without evaluations, the summary at the end unless it is the only log, and what a resumed run
    repeats.

    Their steps ascend. Where a log's step does not, the run was resumed from there, and it replaces those from its
    step on.
    """

    def __init__(self, metrics: Iterable[str]):
        self._places = {metric: place for place, metric in enumerate(metrics)}
        self._steps = array("q")
        self._cells = array("d")  # a row for each step

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, log: Mapping) -> None:
        """Add a log if it is that of an update."""
        is_update = "loss" in log or "bapo/positive_share" in log
        is_summary = "train_runtime" in log  # into which TRL puts what it has not logged yet
        if not is_update or (is_summary and self._steps):
            return
        step = log.get("step")
        if not isinstance(step, int) or not 0 <= step <= sys.maxsize:
            return
        steps = self._steps
        while steps and steps[-1] >= step:
            steps.pop()
            del self._cells[-len(self._places) :]
        steps.append(step)
        row = [_NOT_LOGGED] * len(self._places)
        for metric, value in log.items():
            place = self._places.get(metric)
            if place is not None:
                row[place] = float(value) if is_finite(value) else _UNDEFINED
        self._cells.extend(row)

    @property
    def steps(self) -> np.ndarray:
        """Steps of all logs, ascending."""
        return np.array(self._steps)

    def logged(self, metric: str) -> Points:
        """Return the values of a metric where it was logged, NaN where it was undefined."""
        values = np.frombuffer(self._cells).reshape(len(self), -1)[:, self._places[metric]]
        is_logged = values != _NOT_LOGGED
        return Points(self.steps[is_logged], values[is_logged])

    def finite(self, metric: str) -> Points:
        """Return the values of a metric where it was logged as a finite number."""
        steps, values = self.logged(metric)
        is_defined = np.isfinite(values)
        return Points(steps[is_defined], values[is_defined])


def is_finite(value: object) -> TypeGuard[float]:
    """Return whether a logged value is a finite number; `None` and text are none."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


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
