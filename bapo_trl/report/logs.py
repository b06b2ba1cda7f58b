"""The logs of a run, and curves of several runs."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np


class Points(NamedTuple):
    """Updates, and the values of a metric at them: arrays of one length, in the order of the updates."""

    steps: np.ndarray
    values: np.ndarray


class Logs:
    """
    Logs of updates, without evaluations, and without the summary at the end unless it is the only log.

    Their steps ascend. Where a log's step does not, the run was resumed from there, and it replaces those from its
    step on.
    """

    def __init__(self, log_history: Iterable[Mapping]):
        self._logs: list[Mapping] = []
        for log in log_history:
            is_summary = "train_runtime" in log  # into which TRL puts what it has not logged yet
            if not is_of_updates(log) or (is_summary and self._logs):
                continue
            while self._logs and self._logs[-1]["step"] >= log["step"]:
                self._logs.pop()
            self._logs.append(log)
        self.steps = [log["step"] for log in self._logs]

    def __len__(self) -> int:
        return len(self._logs)

    def points(self, metric: str) -> Points:
        """Return the values of a metric where it was logged as a finite number."""
        logged = [(log["step"], log[metric]) for log in self._logs if log.get(metric) is not None]
        logged = [(step, value) for step, value in logged if math.isfinite(value)]
        return Points(np.array([step for step, _ in logged], int), np.array([value for _, value in logged], float))


def is_of_updates(log: Mapping) -> bool:
    """Return whether a log is of updates, not of an evaluation or the end of a run."""
    return "loss" in log or any(name.startswith("bapo/") for name in log)


class Curve(NamedTuple):
    """The mean of some runs at each update that one of them logged, and its range."""

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
    return Curve(steps, np.nanmean(table, 0), np.nanmin(table, 0), np.nanmax(table, 0))
