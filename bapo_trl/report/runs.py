"""Logs, settings and accuracies that runs saved, and which runs differ in nothing but the seed.

The logs are those of `trainer_state.json`. The settings are in `run_settings.json`, which
[`~callback.ReportCallback`] writes: transformers keeps them in a pickle only, which is not read here.
"""

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import InputError


STATE_FILE = "trainer_state.json"
SETTINGS_FILE = "run_settings.json"
RESULTS_FILE = "eval_results.json"


class Points(NamedTuple):
    """Updates, and the values of a metric at them: arrays of one length, in the order of the updates."""

    steps: np.ndarray
    values: np.ndarray


class Logs:
    """
    Logs of updates, without the summary at the end unless it is the only log, and the evaluations between them.

    Their steps ascend. Where a log's step does not, the run was resumed from there, and it replaces those from its
    step on.
    """

    def __init__(self, log_history: Iterable[Mapping]):
        self._logs: list[Mapping] = []
        self._evaluations: dict[int, Mapping] = {}
        for log in log_history:
            is_summary = "train_runtime" in log  # into which TRL puts what it has not logged yet
            if "eval_reward" in log and not is_of_updates(log):
                self._evaluations = {step: one for step, one in self._evaluations.items() if step < log["step"]}
                self._evaluations[log["step"]] = log
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

    def accuracies(self, results: Mapping[str, Any]) -> Points:
        """
        Return accuracy and standard error (0 if unknown) of each evaluation, two columns: avg@k, or the mean reward if
        it is never negative.

        Args:
            results (`Mapping[str, Any]`):
                Results of the evaluation before and after training; empty if there was none.
        """
        measured, name = self._measured(results), self.accuracy_name(results)
        rows = [
            (step, log[name], log.get(f"{name}_stderr", 0.0))
            for step, log in sorted(measured.items())
            if log.get(name) is not None and math.isfinite(log[name])
        ]
        if any(value < 0 for _, value, _ in rows):
            rows = []
        steps, values = [step for step, *_ in rows], [values for _, *values in rows]
        return Points(np.array(steps, int), np.array(values, float).reshape(-1, 2))

    def accuracy_name(self, results: Mapping[str, Any]) -> str:
        """Return the name of what [`Logs.accuracies`] returns: `eval_avg@k`, or `eval_reward`."""
        names = [name for log in self._measured(results).values() for name in log]
        return next((name for name in names if re.fullmatch(r"eval_avg@\d+", name)), "eval_reward")

    def _measured(self, results: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """Return what each evaluation measured, by update."""
        measured: dict[int, dict[str, Any]] = {step: dict(log) for step, log in self._evaluations.items()}
        for prefix, step in (("before_", 0), ("eval_", self.steps[-1] if self.steps else 0)):
            some = {f"eval_{name.removeprefix(prefix)}": results[name] for name in results if name.startswith(prefix)}
            if some:
                measured.setdefault(step, {}).update(some)
        return measured


def is_of_updates(log: Mapping) -> bool:
    """Return whether a log is of updates, not of an evaluation or the end of a run."""
    return "loss" in log or any(name.startswith("bapo/") for name in log)


@dataclass(frozen=True)
class Run:
    """A run, as far as it has saved."""

    label: str
    logs: Logs
    settings: Mapping[str, Any]  # empty if it saved none
    results: Mapping[str, Any] = field(default_factory=dict)  # of its evaluation before and after training

    @property
    def facts(self) -> Mapping[str, Any]:
        """What follows from its settings, see `facts`; empty if it wrote none."""
        return self.settings.get("facts", {})

    def title(self, label: str | None = None) -> str:
        """Return its method, if that is known, and its label or another one."""
        method, label = self.facts.get("method"), label or self.label
        return f"{method}: {label}" if method else label


class Group(NamedTuple):
    """Runs that are drawn as one line, with a band if they are several seeds."""

    title: str
    runs: Sequence[Run]


def read_runs(paths: Sequence[str | Path]) -> list[Run]:
    """
    Read runs, each one once, and name them by what tells their paths apart.

    A path is an `output_dir`, a checkpoint folder or a `trainer_state.json`.
    """
    files = {path: _state_file(path) for path in dict.fromkeys(Path(path).resolve() for path in paths)}
    # `compare` keeps states under the names of their runs
    named = [path.parent if path.name == STATE_FILE else path for path in files]
    common = os.path.commonpath([path.parent for path in named])
    runs = []
    for name, file in zip(named, files.values(), strict=True):
        logs = Logs(_read_json(file).get("log_history", ()))
        if not len(logs):
            raise InputError(
                f"RUN {file} has no log of an update: train with a smaller `logging_steps`, or give another run."
            )
        beside = file.with_name(file.name.replace(STATE_FILE, SETTINGS_FILE))
        settings = _read_json(beside) if beside.is_file() else read_settings(file.parent)
        results = read_settings(file.parent, RESULTS_FILE)
        runs.append(Run(name.relative_to(common).as_posix(), logs, settings, results))
    return runs


def read_settings(folder: Path, name: str = SETTINGS_FILE) -> Mapping[str, Any]:
    """Return the settings of a run, or another file of it, by its output folder, a checkpoint or `merged`."""
    for candidate in (folder / name, folder.parent / name):
        if candidate.is_file() and (candidate.parent == folder or folder.name.startswith(("checkpoint-", "merged"))):
            return _read_json(candidate)
    return {}


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Group runs that are seeds of one setting: with equal fingerprints, and seeds that all differ."""
    alike: dict[object, list[Run]] = {}
    for run in runs:
        alike.setdefault(run.settings.get("fingerprint", run.label), []).append(run)
    parts: list[list[Run]] = []
    for some in alike.values():
        seeds = {(run.settings.get("seed"), run.settings.get("data_seed")) for run in some}
        parts += [some] if len(seeds) == len(some) else [[run] for run in some]
    labels = [_shared_label([run.label for run in part]) for part in parts]
    return [
        Group(part[0].title(label if labels.count(label) == 1 else ", ".join(run.label for run in part)), part)
        for label, part in zip(labels, parts, strict=True)
    ]


def _shared_label(labels: Sequence[str]) -> str:
    if len(labels) == 1:
        return labels[0]
    start = os.path.commonprefix(labels)  # noqa: RUF071
    return f"{start.rstrip('0123456789-_/=. ')} ({len(labels)} seeds)".lstrip()


def _state_file(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise InputError(f"RUN {path}: no such file or folder. Give the `output_dir` of a run.")
    checkpoints = {re.fullmatch(r"checkpoint-(\d+)", file.parent.name): file for file in path.glob(f"*/{STATE_FILE}")}
    saved = {int(name[1]): file for name, file in checkpoints.items() if name}
    if (path / STATE_FILE).is_file():  # older than the checkpoints of a run that was resumed
        saved[_read_json(path / STATE_FILE).get("global_step", -1)] = path / STATE_FILE
    if not saved:
        raise InputError(
            f"RUN {path} has no {STATE_FILE}, nor has a checkpoint in it: give the `output_dir` of a run that has "
            "saved (`save_strategy`, `save_steps`), or one of its checkpoint folders."
        )
    return saved[max(saved)]


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{file} cannot be read ({error}): give another checkpoint of the run, or repair it."
        ) from None
