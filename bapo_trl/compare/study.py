"""A study as a YAML file describes it: which runs it has, and with which flags."""

import hashlib
import itertools
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import InputError
from ..script.recipes import find_recipe, read_recipe


_KEYS = ("base", "arms", "over", "seeds", "measure", "accelerate")
_REQUIRED = ("base", "arms", "seeds", "measure")
_OWN = ("seed", "output_dir", "do_train", "do_eval", "eval_strategy", "eval_steps", "num_generations_eval",
        "logging_steps", "dry_run")  # fmt: skip
_DEFAULTS = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}


@dataclass(frozen=True)
class Run:
    """One run of a study."""

    arm: str
    sweep: dict[str, Any]  # values of what the study varies for all arms
    seed: int
    flags: dict[str, Any]  # of `bapo-trl train`, without `output_dir`
    settings: dict[str, Any]  # the same, with those of its recipe: what tells the run from one of other settings

    @property
    def label(self) -> str:
        """Arm, setting and seed, as text."""
        return ", ".join(part for part in (self.arm, name_setting(self.sweep), f"seed {self.seed}") if part)

    @property
    def key(self) -> str:
        """Name of the run among the files of a study: readable, and another for other settings."""
        digest = hashlib.sha256(json.dumps([self.arm, self.settings], sort_keys=True, default=str).encode())
        name = f"{self.arm}, {name_setting(dict(sorted(self.sweep.items())))}, seed {self.seed}"
        return f"{re.sub(r'[^a-zA-Z0-9.]+', '_', name).strip('_')[:100]}-{digest.hexdigest()[:10]}"


def name_setting(sweep: Mapping[str, Any]) -> str:
    """Return what a study varies as text, `name value` each."""
    return ", ".join(f"{name} {value}" for name, value in sweep.items())


@dataclass(frozen=True)
class Study:
    """Arms that are compared, over settings and seeds."""

    base: dict[str, Any]  # flags that all runs have
    arms: dict[str, dict[str, Any]]  # flags of each arm; the first is what the others are compared with
    sweep: dict[str, list]  # values of flags that all arms share: each combination is a setting of its own
    seeds: list[int]  # arms with the same seed see the same prompts in the same order
    measure: dict[str, Any]  # `every` so many updates, `avg_at` so many completions of each prompt, on a `dataset`
    accelerate: str | None = None  # with which `bapo-trl launch` starts the runs; by default one process each

    def runs(self) -> list[Run]:
        """Return all runs, seed by seed, so that a study that is cut short has all arms."""
        settings = [dict(zip(self.sweep, values, strict=True)) for values in itertools.product(*self.sweep.values())]
        return [self._run(seed, sweep, arm) for seed in self.seeds for sweep in settings for arm in self.arms]

    def launch(self) -> Any:
        """Return what the configuration of accelerate launches for a run; `None` without one."""
        if self.accelerate is None:
            return None
        from ..script.launcher import launch_of  # takes accelerate

        return launch_of(self.accelerate)

    def processes(self) -> int:
        """Return how many processes a run has."""
        launch = self.launch()
        return 1 if launch is None else launch.num_processes or 1

    def _run(self, seed: int, sweep: dict[str, Any], arm: str) -> Run:
        measured = {
            "do_train": True,
            "do_eval": True,
            "dry_run": False,
            "eval_strategy": "steps",
            "eval_steps": self.measure["every"],
            "num_generations_eval": self.measure["avg_at"],
            "logging_steps": 1,
        }
        if "dataset" in self.measure:
            measured["eval_dataset"] = self.measure["dataset"]
        flags = {**_DEFAULTS, **self.base, **sweep, **self.arms[arm], **measured, "seed": seed}
        recipe = {} if "config" not in flags else read_recipe(str(flags["config"]))
        settings = {**recipe, **{name: value for name, value in flags.items() if name != "config"}}
        if self.accelerate is not None:
            settings["accelerate"] = self.accelerate
        return Run(arm, sweep, seed, flags, settings)

    def check(self, on_gpus: bool = False) -> None:
        """
        Read the flags of each arm in each setting as `train` would, before any run begins; refuse as it would, also
        where they name no data, rewards or model.

        They are read as in as many processes as a run has, on this machine, or as on one with GPUs. For unknown flags,
        that is `SystemExit`, with 2 and one line on stderr.
        """
        from ..script.command_line import parse_arguments  # takes TRL
        from ..script.commands import Command
        from ..script.planning import as_in_processes
        from ..script.rewards import resolve_names

        environment = dict(os.environ)
        try:
            for run in (run for run in self.runs() if run.seed == self.seeds[0]):
                command = Command(f"bapo-trl compare, arm {run.arm!r}", "")
                try:
                    with as_in_processes(self.processes(), on_gpus):
                        settings = parse_arguments([*as_arguments(run.flags), "--output_dir", "study"], command)
                        resolve_names(settings)
                except ValueError as error:
                    where = f" ({name_setting(run.sweep)})" if run.sweep else ""
                    raise InputError(f"arm '{run.arm}'{where}: {error}") from error
        finally:  # transformers' settings set variables of accelerate, which are not the runs'
            os.environ.clear()
            os.environ.update(environment)


def as_arguments(flags: Mapping[str, Any]) -> list[str]:
    """Return flags as they stand on a command line."""
    arguments: list[str] = []
    for name, value in flags.items():
        if isinstance(value, list):
            arguments += [f"--{name}", *map(_as_text, value)]
        else:
            arguments.append(f"--{name}={_as_text(value)}")
    return arguments


def _as_text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | bool) else str(value)


def read_study(path: str) -> Study:
    """Read a study from a YAML file; refuse what is none, in one sentence with the fix (`InputError`)."""
    if find_recipe(path) != path:
        raise InputError(f"STUDY is '{path}': there is no such file.")
    content = read_recipe(path)
    for name in content:
        if name not in _KEYS:
            raise InputError(f"{path}: `{name}` is no part of a study: they are {', '.join(_KEYS)}.")
    for name in _REQUIRED:
        if not content.get(name):
            raise InputError(f"{path}: `{name}` is missing: docs/compare.md has an example.")
    base, arms, seeds, measure = (content[name] for name in _REQUIRED)
    sweep = content.get("over") or {}
    named = {"`base`": base, "`arms`": arms, "`over`": sweep, "`measure`": measure}
    if isinstance(arms, dict):
        arms = {str(arm): flags or {} for arm, flags in arms.items()}
        named |= {f"arm '{arm}'": flags for arm, flags in arms.items()}
    for title, flags in named.items():
        if not isinstance(flags, dict):
            raise InputError(f"{path}: {title} is {flags!r}: set it to names and values.")
        for name in _OWN:
            if name in flags:
                raise InputError(f"{path}: {title} has `{name}`, which the study sets itself: leave it out.")
    if not {"every", "avg_at"} <= measure.keys() <= {"every", "avg_at", "dataset"}:
        raise InputError(f"{path}: `measure` is {measure!r}: it takes every, avg_at and, if you like, dataset.")
    for name, values in sweep.items():
        if not _is_list(values):
            raise InputError(f"{path}: `over` has {name}: {values!r}: set it to a list of values, each once.")
        taken = [arm for arm, flags in arms.items() if name in flags]
        if taken or name in base:
            raise InputError(f"{path}: `{name}` is in `over` and in {taken or '`base`'}: leave one of them out.")
    if not _is_list(seeds) or not all(type(seed) is int for seed in seeds):
        raise InputError(f"{path}: `seeds` is {seeds!r}: set it to a list of whole numbers, each once.")
    return Study(base, arms, sweep, seeds, measure, content.get("accelerate"))


def _is_list(values: Any) -> bool:
    """Return whether a value is a list of values that differ."""
    return isinstance(values, list) and 0 < len(values) == len(set(map(str, values)))
