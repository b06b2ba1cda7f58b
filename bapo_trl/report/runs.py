"""What runs left on the disk: their logs and settings, and which of them differ in nothing but the seed.

The logs are those of `trainer_state.json`. The settings are in `run_settings.json`, which
[`~callback.ReportCallback`] writes: transformers keeps them in a pickle only, which is not read here.
"""

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..errors import InputError
from .facts import Facts, facts_in
from .logs import Logs


STATE_FILE = "trainer_state.json"
SETTINGS_FILE = "run_settings.json"

_SEED = re.compile(r"seed[-_=]?\d+")


@dataclass(frozen=True)
class Run:
    """A run, as far as it has saved."""

    label: str
    logs: Logs
    settings: Mapping  # empty if it saved none
    path: Path  # where it was read, without symbolic links

    @cached_property
    def facts(self) -> Facts:
        """What it trains with."""
        return facts_in(self.settings)


@dataclass(frozen=True)
class Group:
    """Runs that are drawn as one line, with a band if they are several seeds."""

    label: str
    runs: Sequence[Run]

    @property
    def title(self) -> str:
        """Its method, if that is known, and its label."""
        return _titled(self.runs[0].facts.method, self.label)


def title_of(runs: Iterable[Run]) -> str:
    """Return methods and labels of runs, each method once."""
    labels: dict[str, list[str]] = {}
    for run in runs:
        labels.setdefault(run.facts.method, []).append(run.label)
    return "; ".join(_titled(name, ", ".join(some)) for name, some in labels.items())


def _titled(method: str, label: str) -> str:
    return f"{method}: {label}" if method else label


def read_runs(paths: Sequence[str | Path]) -> list[Run]:
    """
    Read runs, each one once, and name them by the shortest ends of their paths that tell them apart.

    A path is an `output_dir`, a checkpoint folder or a `trainer_state.json`.
    """
    unique = {Path(path).resolve(): None for path in paths}
    files = {path: _state_file(path) for path in unique}
    labels = _labels([_named(path) for path in unique])
    return [
        Run(label, _read_logs(file), read_settings(file.parent), path)
        for label, (path, file) in zip(labels, files.items(), strict=True)
    ]


def read_settings(folder: Path) -> Mapping:
    """Return the settings of a run by a folder of it: what it saves to, a checkpoint, `merged`; empty if none."""
    for candidate in (folder / SETTINGS_FILE, folder.parent / SETTINGS_FILE):
        if candidate.is_file() and (candidate.parent == folder or folder.name.startswith(("checkpoint-", "merged"))):
            return _read_json(candidate)
    return {}


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """
    Group runs that are seeds of one setting; all others stay alone.

    Runs with settings belong together if their fingerprints are equal and their seeds all differ. Runs without belong
    together if their paths are equal but for a number after `seed`, as in `mine/seed1`, `mine/seed2`.
    """
    alike: dict[object, list[Run]] = {}
    for run in runs:
        alike.setdefault(_setting(run), []).append(run)
    parts: list[list[Run]] = []
    for some in alike.values():
        seeds = {(run.settings.get("seed"), run.settings.get("data_seed")) for run in some}
        are_seeds = len(seeds) == len(some) or not some[0].settings
        parts += [some] if are_seeds else [[run] for run in some]
    labels = [_group_label(part) for part in parts]
    return [
        Group(label if labels.count(label) == 1 else ", ".join(run.label for run in part), part)
        for label, part in zip(labels, parts, strict=True)
    ]


def _setting(run: Run) -> object:
    by_path = _SEED.sub("seed", str(run.path)) if _SEED.search(str(run.path)) else run.path
    return run.settings.get("fingerprint", by_path)


def _group_label(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return runs[0].label
    same = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*(run.label for run in runs), strict=False))
    start = "".join(letters[0] for letters in same)
    name = re.sub(r"([-_/=. ]|\bseed|_seed)*$", "", re.sub(r"\d+$", "", start))
    return f"{name or runs[0].path.parent.name} ({len(runs)} seeds)"


def _named(path: Path) -> Path:
    return path.parent if path.name == STATE_FILE else path  # `compare` keeps a state under the name of its run


def _labels(paths: Sequence[Path]) -> list[str]:
    for length in range(1, max(len(path.parts) for path in paths)):
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
            "saved (`save_strategy`, `save_steps`), or one of its checkpoint folders."
        )
    # Not by the clock: a copy of the folder has its files in any order
    return max(files, key=lambda file: (_updates(file), file.parent == path))


def _updates(file: Path) -> int:
    """Return the number of updates at which a state was saved; -1 if it does not tell."""
    checkpoint = re.fullmatch(r"checkpoint-(\d+)", file.parent.name)
    if checkpoint:  # without reading each of them, which may be many
        return int(checkpoint[1])
    step = _read_json(file).get("global_step")
    return step if isinstance(step, int) else -1


def _read_logs(file: Path) -> Logs:
    history = _read_json(file).get("log_history")
    logs = Logs(log for log in history or () if isinstance(log, dict))
    if not len(logs):
        raise InputError(
            f"RUN {file} has no log of an update: train with a smaller `logging_steps`, or give another run."
        )
    return logs


def _read_json(file: Path) -> dict:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{file} cannot be read ({error}): give another checkpoint of the run, or mend it.") from None
    if not isinstance(content, dict):
        raise InputError(f"{file} is damaged: it holds no values by name. Give another checkpoint of the run.")
    return content
