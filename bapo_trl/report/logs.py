"""The logs of a run, and curves of several runs."""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeGuard

import numpy as np


_OF_A_GENERATION = ("reward", "reward_std", "frac_reward_zero_std")
_PREFIXES_OF_A_GENERATION = ("rewards/", "completions/", "replay/", "partial/", "sampling/", "tools/")


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

    def __init__(self, log_history: Iterable[Mapping]):
        self._logs: list[Mapping] = []
        for log in log_history:
            step = log.get("step")
            is_step = isinstance(step, int) and 0 <= step <= sys.maxsize
            is_summary = "train_runtime" in log  # into which TRL puts what it has not logged yet
            if not is_step or not is_of_updates(log) or (is_summary and self._logs):
                continue
            while self._logs and self._logs[-1]["step"] >= step:
                self._logs.pop()
            self._logs.append(log)
        self.steps = np.array([log["step"] for log in self._logs], dtype=int)

    def __len__(self) -> int:
        return len(self._logs)

    def logged(self, metric: str) -> Points:
        """
        Return the values of a metric, NaN where it is undefined.

        A metric is undefined where it is not a number. One that is measured at every update is also undefined where it
        is missing; one of a generation may just not be due.
        """
        is_due = metric not in _OF_A_GENERATION and not metric.startswith(_PREFIXES_OF_A_GENERATION)
        is_due &= any(metric in log for log in self._logs)
        points = [(log["step"], log.get(metric)) for log in self._logs if is_due or metric in log]
        values = [value if is_finite(value) else math.nan for _, value in points]
        return Points(np.array([step for step, _ in points], dtype=int), np.array(values, dtype=float))

    def finite(self, metric: str) -> Points:
        """Return the values of a metric where it was logged as a finite number."""
        steps, values = self.logged(metric)
        is_defined = np.isfinite(values)
        return Points(steps[is_defined], values[is_defined])


def is_of_updates(log: Mapping) -> bool:
    """Return whether a log is of updates, not of an evaluation or the end of a run."""
    return "loss" in log or any(name.startswith("bapo/") for name in log)


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
    steps = np.unique(np.concatenate([column.steps for column in columns]))
    table = np.full((len(columns), len(steps)), np.nan)
    for row, column in zip(table, columns, strict=True):
        row[np.searchsorted(steps, column.steps)] = column.values
    defined = np.ma.masked_invalid(table)
    return Curve(steps, *(part.filled(np.nan) for part in (defined.mean(0), defined.min(0), defined.max(0))))
