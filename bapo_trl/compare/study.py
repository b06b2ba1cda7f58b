"""Read a study from its YAML file, and list its runs with their flags."""

import hashlib
import itertools
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import InputError
from ..script.settings.recipes import find_recipe, read_recipe


_KEYS = ("base", "arms", "over", "seeds", "measure", "accelerate")
_REQUIRED = ("base", "arms", "seeds", "measure")
_OWN = ("seed", "output_dir", "do_train", "do_eval", "eval_strategy", "eval_steps", "num_generations_eval",
        "logging_steps", "dry_run")  # fmt: skip
_SECRET = re.compile(r"(.*_)?(token|(api|access)_?key|secret|password)", re.IGNORECASE)  # of a setting or a variable
_DEFAULTS = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}


@dataclass(frozen=True)
class Run:
    """One run of a study."""

    arm: str
    sweep: dict[str, Any]  # values of the settings in `over`, which vary for all methods
    seed: int
    flags: dict[str, Any]  # flags of `bapo-trl train`, without `output_dir`
    settings: dict[str, Any]  # flags and the recipe's settings without values of secrets: they identify the run
    secrets: tuple[str, ...] = field(default=(), repr=False)  # values that are not written
    target: float | None = None  # accuracy to reach
    clock: str = "wall"  # what seconds are counted by: "wall" or "cpu"

    @property
    def label(self) -> str:
        """Text with the method, the setting and the seed."""
        return ", ".join(part for part in (self.arm, name_setting(self.sweep), f"seed {self.seed}") if part)

    @property
    def key(self) -> str:
        """File name of the run: readable, and unique for its settings."""
        digest = hashlib.sha256(json.dumps([self.arm, self.settings], sort_keys=True, default=str).encode())
        name = f"{self.arm}, {name_setting(dict(sorted(self.sweep.items())))}, seed {self.seed}"
        return f"{re.sub(r'[^a-zA-Z0-9.]+', '_', name).strip('_')[:100]}-{digest.hexdigest()[:10]}"


def name_setting(sweep: Mapping[str, Any]) -> str:
    """Return the settings in `over` as text, `name value` for each."""
    return ", ".join(f"{name} {value}" for name, value in sweep.items())


@dataclass(frozen=True)
class Study:
    """Study that compares methods (`arms`) over settings and seeds."""

    base: dict[str, Any]  # flags of all runs
    arms: dict[str, dict[str, Any]]  # flags of each method; the first method is the baseline
    sweep: dict[str, list]  # values of flags that vary for all methods (`over`): each combination is a setting
    seeds: list[int]  # methods with the same seed see the same prompts in the same order
    # Evaluate `every` N updates, with `avg_at` completions per prompt, on a `dataset`; time by `clock` to a `target`
    measure: dict[str, Any]
    accelerate: str | None = None  # `accelerate_config` of the runs; by default one process per run

    def runs(self) -> list[Run]:
        """Return all runs, ordered by seed, so that an interrupted study has results of all methods."""
        settings = [dict(zip(self.sweep, values, strict=True)) for values in itertools.product(*self.sweep.values())]
        return [self._run(seed, sweep, arm) for seed in self.seeds for sweep in settings for arm in self.arms]

    def processes(self) -> int:
        """Return the number of processes of a run."""
        if self.accelerate is None:
            return 1
        from ..script.launcher import launch_of  # imports accelerate

        return launch_of(self.accelerate).num_processes or 1

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
        secrets: list[str] = []
        settings = _without_secrets(settings, secrets)
        if isinstance(settings.get("env"), dict):  # which holds more than names show
            settings["env"] = sorted(map(str, settings["env"]))
        target, clock = self.measure.get("target"), self.measure.get("clock", "wall")
        return Run(arm, sweep, seed, flags, settings, tuple(secrets), target, clock)

    def check(self, on_gpus: bool = False) -> None:
        """
        Check the flags of each method in each setting, as `train` does, before any run starts. Raise the same errors,
        also for missing data, rewards or models.

        The check assumes as many processes as a run has, on this machine or (`on_gpus`) on a machine with GPUs.
        Unknown flags raise `SystemExit` with 2, and print one line on stderr.
        """
        from ..script.commands import Command
        from ..script.plan import as_in_processes
        from ..script.rewards import resolve_names
        from ..script.settings.parser import parse_arguments  # imports TRL

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
        finally:  # transformers' arguments set environment variables that the runs must not inherit
            os.environ.clear()
            os.environ.update(environment)


def _without_secrets(settings: Mapping[str, Any], secrets: list[str]) -> dict[str, Any]:
    """Return settings with the name of each secret in place of its value, which is added to `secrets`."""
    kept = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):  # such as `env`
            value = _without_secrets(value, secrets)
        elif isinstance(value, str) and _SECRET.fullmatch(str(name)):
            secrets += [value] if value else []
            value = f"<{str(name).upper()}>"
        kept[name] = value
    return kept


def as_arguments(flags: Mapping[str, Any]) -> list[str]:
    """Return flags as command-line arguments."""
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
    """Return the study in a YAML file; raise an `InputError` with the fix if the file is not a valid study."""
    if find_recipe(path) != path:
        raise InputError(f"STUDY is '{path}': there is no such file. Set it to the path of a YAML file.")
    content = read_recipe(path)
    for name in content:
        if name not in _KEYS:
            raise InputError(f"{path}: unknown key `{name}`: a study has the keys {', '.join(_KEYS)}.")
    for name in _REQUIRED:
        if not content.get(name):
            raise InputError(f"{path}: `{name}` is missing: add it, as in the example in docs/compare.md.")
    base, arms, seeds, measure = (content[name] for name in _REQUIRED)
    sweep = content.get("over") or {}
    named = {"`base`": base, "`arms`": arms, "`over`": sweep, "`measure`": measure}
    if isinstance(arms, dict):
        arms = {str(arm): flags or {} for arm, flags in arms.items()}
        named |= {f"arm '{arm}'": flags for arm, flags in arms.items()}
    for title, flags in named.items():
        if not isinstance(flags, dict):
            raise InputError(f"{path}: {title} is {flags!r}: set it to a mapping of names to values.")
        for name in _OWN:
            if name in flags:
                raise InputError(f"{path}: {title} has `{name}`, which the study sets itself: remove it.")
    if not {"every", "avg_at"} <= measure.keys() <= {"every", "avg_at", "dataset", "target", "clock"}:
        raise InputError(
            f"{path}: `measure` is {measure!r}: set `every`, `avg_at` and, optionally, `dataset`, `target`, `clock`."
        )
    target, clock = measure.get("target"), measure.get("clock", "wall")
    if target is not None and (isinstance(target, bool | str) or not 0 < target <= 1):
        raise InputError(f"{path}: `target` is {target!r}: set it to an accuracy above 0, up to 1.")
    if clock not in ("wall", "cpu"):
        raise InputError(f"{path}: `clock` is {clock!r}: set it to wall or cpu.")
    for name, values in sweep.items():
        if not _is_list(values):
            raise InputError(f"{path}: `over` has {name}: {values!r}: set it to a list of distinct values.")
        taken = [arm for arm, flags in arms.items() if name in flags]
        if taken or name in base:
            raise InputError(f"{path}: `{name}` is in `over` and in {taken or '`base`'}: remove one of them.")
    if not _is_list(seeds) or not all(type(seed) is int for seed in seeds):
        raise InputError(f"{path}: `seeds` is {seeds!r}: set it to a list of distinct whole numbers.")
    return Study(base, arms, sweep, seeds, measure, content.get("accelerate"))


def _is_list(values: Any) -> bool:
    """Return whether a value is a non-empty list of distinct values."""
    return isinstance(values, list) and 0 < len(values) == len(set(map(str, values)))
