"""What runs left on the disk: their logs and settings, and which of them differ in nothing but the seed.

The logs are those of `trainer_state.json`. The settings are in `run_settings.json`, which
[`~callback.ReportCallback`] writes: transformers keeps them in a pickle only, which is not read here.
"""

import contextlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import InputError


STATE_FILE = "trainer_state.json"
SETTINGS_FILE = "run_settings.json"

NOT_OF_THE_SETTING = frozenset(
    {
        "seed", "data_seed", "output_dir", "run_name", "logging_dir", "resume_from_checkpoint", "hub_model_id",
        "eval_output_dir", "local_rank", "project", "trackio_space_id",
    }
)  # fmt: skip
"""Settings in which the seeds of one setting may differ."""

_SEED = re.compile(r"seed[-_=]?\d+")


@dataclass(frozen=True)
class Run:
    """
    A run, as far as it has saved.

    Args:
        label (`str`): Its name in the report.
        logs (sequence of mappings): Logs of its updates, in the order of their `step`, none twice.
        settings (mapping): Settings by name; empty if the run saved none.
        path (`Path`): Where it was read, without symbolic links.
    """

    label: str
    logs: Sequence[Mapping]
    settings: Mapping = field(default_factory=dict)
    path: Path = Path()


@dataclass(frozen=True)
class Group:
    """Runs that are drawn as one line, with a band if they are several seeds."""

    label: str
    runs: Sequence[Run]


def update_logs(log_history: Iterable[Mapping]) -> list[Mapping]:
    """
    Return the logs of updates, in order: without evaluations, the summary at the end, and what a resumed run repeats.

    Where the step falls back, the run was resumed from there, and later logs replace those that came before.
    """
    logs: list[Mapping] = []
    for log in log_history:
        is_update = "loss" in log or "bapo/positive_share" in log
        if not is_update or "train_runtime" in log:  # TRL puts what it has not logged yet into the summary
            continue
        while logs and logs[-1]["step"] >= log["step"]:
            logs.pop()
        logs.append(log)
    return logs


def read_runs(paths: Sequence[str | Path]) -> list[Run]:
    """
    Read runs, each one once, and name them by the shortest ends of their paths that tell them apart.

    Args:
        paths (sequence of `str` or `Path`):
            Each an `output_dir`, a checkpoint folder, a `trainer_state.json` or a file of logs, one JSON object a
            line (jsonl).

    Raises:
        ValueError: If a path does not exist, holds no state, is damaged, or no update was logged.
    """
    unique = list({Path(path).resolve(): None for path in paths})
    files = [_state_file(path) for path in unique]
    return [
        Run(label, _read_logs(file), read_settings(file.parent), path)
        for label, file, path in zip(_labels([_named(path) for path in unique]), files, unique, strict=True)
    ]


def read_settings(folder: Path) -> Mapping:
    """Return the settings of a run by one of its folders, the one it saves to or a checkpoint; empty if none."""
    for candidate in (folder / SETTINGS_FILE, folder.parent / SETTINGS_FILE):
        if candidate.is_file() and (candidate.parent == folder or folder.name.startswith("checkpoint-")):
            settings = _parse(candidate.read_text(encoding="utf-8"), candidate)
            if not isinstance(settings, dict):
                raise InputError(f"{candidate} is damaged: no settings by name. Remove it; the report goes without.")
            return settings
    return {}


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """
    Group runs that are seeds of one setting; all others stay alone.

    Runs with settings belong together if these are equal but for [`NOT_OF_THE_SETTING`] and the seeds all differ. Runs
    without belong together if their paths are equal but for a number after `seed`, as in `mine/seed1`, `mine/seed2`.
    """
    alike: dict[object, list[Run]] = {}
    for run in runs:
        alike.setdefault(_setting(run), []).append(run)
    parts: list[list[Run]] = []
    for some in alike.values():
        seeds = {(run.settings.get("seed"), run.settings.get("data_seed")) for run in some}
        are_seeds = len(seeds) == len(some) if some[0].settings else True
        parts += [some] if are_seeds else [[run] for run in some]
    labels = [_group_label(part) for part in parts]
    return [
        Group(label if labels.count(label) == 1 else ", ".join(run.label for run in part), part)
        for label, part in zip(labels, parts, strict=True)
    ]


def _setting(run: Run) -> object:
    if run.settings:
        setting = {name: value for name, value in run.settings.items() if name not in NOT_OF_THE_SETTING}
        return json.dumps(setting, sort_keys=True)
    return _SEED.sub("seed", str(run.path)) if _SEED.search(str(run.path)) else run.path


def _group_label(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return runs[0].label
    start = _common_start([run.label for run in runs])
    name = re.sub(r"([-_/=. ]|\bseed|_seed)*$", "", re.sub(r"\d+$", "", start))
    return f"{name or runs[0].path.parent.name} ({len(runs)} seeds)"


def _common_start(texts: Sequence[str]) -> str:
    same = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    return "".join(letters[0] for letters in same)


def _named(path: Path) -> Path:
    return path.parent if path.name == STATE_FILE else path if path.is_dir() else path.with_suffix("")


def _labels(paths: Sequence[Path]) -> list[str]:
    for length in range(1, 1 + max((len(path.parts) for path in paths), default=0)):
        labels = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(labels)) == len(labels):
            return labels
    return [str(path) for path in paths]


def _state_file(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise InputError(f"RUN {path}: no such file or folder. Give the `output_dir` of a run.")
    files = [file for file in (path / STATE_FILE, *path.glob(f"checkpoint-*/{STATE_FILE}")) if file.is_file()]
    if not files:
        raise InputError(
            f"RUN {path} has no {STATE_FILE}, nor has a checkpoint in it: give the `output_dir` of a run that has "
            "saved (`save_strategy`, `save_steps`), one of its checkpoint folders, or a file of its logs."
        )
    return max(files, key=lambda file: (file.stat().st_mtime, file.parent == path))


def _read_logs(file: Path) -> list[Mapping]:
    text = file.read_text(encoding="utf-8", errors="replace")
    if file.suffix == ".jsonl":
        *whole, last = text.split("\n")  # a run that still writes, or was killed, may leave a part of a line
        history = [_parse(line, file) for line in whole if line.strip()]
        with contextlib.suppress(json.JSONDecodeError):
            history.append(json.loads(last))
    else:
        state = _parse(text, file)
        history = state.get("log_history") if isinstance(state, dict) else state
    if not isinstance(history, list) or not all(isinstance(log, dict) for log in history):
        raise InputError(f"RUN {file} holds no logs: give a {STATE_FILE}, or a jsonl file of one log a line.")
    logs = [log for log in history if isinstance(log.get("step"), int)]
    updates = update_logs(logs)
    if not updates:
        raise InputError(
            f"RUN {file} has no log of an update: train with a smaller `logging_steps`, or give another run."
        )
    return updates


def _parse(text: str, file: Path):
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{file} is damaged: {error}. Give another checkpoint of the run.") from None
