"""The logs of a run as columns of numbers: a million of them in a few hundred megabytes."""

import math
import sys
from array import array
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeGuard

import numpy as np


_UNDEFINED, _NOT_LOGGED = math.nan, math.inf


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
