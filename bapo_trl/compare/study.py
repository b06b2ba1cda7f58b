"""A study as a YAML file describes it: which runs it has, and with which flags."""

import hashlib
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InputError
from ..script.recipes import find_recipe, read_recipe


_KEYS = ("base", "arms", "over", "seeds", "measure", "accelerate")
_OWN = (
    "seed",
    "output_dir",
    "do_train",
    "do_eval",
    "eval_strategy",
    "eval_steps",
    "num_generations_eval",
    "logging_steps",
    "dry_run",
)
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
    def setting(self) -> str:
        """What the study varies, as text; empty if nothing."""
        return name_setting(self.sweep)

    @property
    def label(self) -> str:
        """Arm, setting and seed, as text."""
        return ", ".join(part for part in (self.arm, self.setting, f"seed {self.seed}") if part)

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
    every: int  # updates between two measurements
    avg_at: int  # completions of each evaluation prompt
    dataset: str | None = None  # evaluation prompts; by default those of `base`
    accelerate: str | None = None  # with which `bapo-trl launch` starts the runs; by default one process each

    def settings(self) -> list[dict[str, Any]]:
        """Return each combination of what the study varies; one that is empty if nothing."""
        return [dict(zip(self.sweep, values, strict=True)) for values in itertools.product(*self.sweep.values())]

    def runs(self) -> list[Run]:
        """Return all runs, seed by seed, so that a study that is cut short has all arms."""
        return [self._run(seed, sweep, arm) for seed in self.seeds for sweep in self.settings() for arm in self.arms]

    def processes(self) -> int:
        """Return how many processes a run has."""
        return 1 if self.accelerate is None else _launch_of(self.accelerate).num_processes or 1

    def gpu_ids(self) -> str | None:
        """Return the GPUs that the configuration of accelerate names for a run, if it names some."""
        named = None if self.accelerate is None else _launch_of(self.accelerate).gpu_ids
        return None if named == "all" else named

    def uses_gpus(self) -> bool:
        """Return whether a run may use GPUs: not if all of them are to train on the CPU."""
        return not all(str(run.settings.get("use_cpu")).lower() == "true" for run in self.runs())

    def shared_server(self) -> str | None:
        """Return the address of a vLLM server that several runs sample from, if there is one."""
        from ..bapo_config import BAPOConfig  # takes TRL

        addresses = []
        for run in self.runs():
            names = ("use_vllm", "vllm_mode", "vllm_server_base_url", "vllm_server_host", "vllm_server_port")
            is_used, mode, url, host, port = (run.settings.get(name, getattr(BAPOConfig, name)) for name in names)
            if str(is_used).lower() == "true" and mode == "server":
                addresses.append(url or f"{host}:{port}")
        return next(iter(_repeated(addresses)), None)

    def _run(self, seed: int, sweep: dict[str, Any], arm: str) -> Run:
        given = {**_DEFAULTS, **self.base, **sweep, **self.arms[arm]}
        measured = {
            "do_train": True,
            "do_eval": True,
            "dry_run": False,
            "eval_strategy": "steps",
            "eval_steps": self.every,
            "num_generations_eval": self.avg_at,
            "logging_steps": 1,
            **({} if self.dataset is None else {"eval_dataset": self.dataset}),
        }
        flags = {**given, **measured, "seed": seed}
        recipe = {} if "config" not in flags else read_recipe(str(flags["config"]))
        settings = {**recipe, **{name: value for name, value in flags.items() if name != "config"}}
        if self.accelerate is not None:
            settings["accelerate"] = self.accelerate
        return Run(arm, sweep, seed, flags, settings)

    def check(self, on_gpus: bool = False) -> None:
        """
        Read the flags of each arm in each setting as `train` would, before any run begins; refuse as it would, also
        where they name no data, rewards or model.

        They are read as in as many processes as a run has, on this machine, or as on one with GPUs. For flags that are
        not known, that is `SystemExit`, with 2 and one line on stderr.
        """
        from ..script.command_line import parse_arguments  # takes TRL
        from ..script.commands import Command
        from ..script.planning import as_in_processes
        from ..script.preparation import resolve_names

        environment = dict(os.environ)
        try:
            for run in self.runs()[: len(self.arms) * len(self.settings())]:
                command = Command(f"bapo-trl compare, arm {run.arm!r}", "")
                try:
                    with as_in_processes(self.processes(), on_gpus):
                        settings = parse_arguments([*as_arguments(run.flags), "--output_dir", "study"], command)
                        resolve_names(*settings)
                except ValueError as error:
                    where = f" ({run.setting})" if run.sweep else ""
                    raise InputError(f"arm '{run.arm}'{where}: {error}") from error
        finally:  # a recipe's variables are those of its own runs
            os.environ.clear()
            os.environ.update(environment)


def _launch_of(accelerate: str) -> Any:
    from ..script.launcher import launch_of  # takes accelerate

    return launch_of(accelerate)


def as_arguments(flags: Mapping[str, Any]) -> list[str]:
    """Return flags as they stand on a command line."""
    arguments: list[str] = []
    for name, value in flags.items():
        texts = [json.dumps(v) if isinstance(v, dict | bool) else str(v) for v in _as_list(value)]
        arguments += [f"--{name}", *texts] if isinstance(value, list) else [f"--{name}={texts[0]}"]
    return arguments


def _as_list(value: Any) -> list:
    return value if isinstance(value, list) else [value]


def read_study(path: str) -> Study:
    """Read a study from a YAML file; refuse what is none, in one sentence with the fix (`InputError`)."""
    if find_recipe(path) != path:
        raise InputError(f"STUDY is '{path}': there is no such file.")
    content = read_recipe(path)
    where = f"{path}: "
    for name in content:
        if name not in _KEYS:
            raise InputError(f"{where}`{name}` is no part of a study: they are {', '.join(_KEYS)}.")
    for name in ("base", "arms", "seeds", "measure"):
        if not content.get(name):
            raise InputError(f"{where}`{name}` is missing: docs/compare.md has an example.")
    base, arms = _mapping(content["base"], f"{where}`base`"), _mapping(content["arms"], f"{where}`arms`")
    arms = {str(arm): _mapping(flags or {}, f"{where}arm '{arm}'") for arm, flags in arms.items()}
    sweep = _mapping(content.get("over") or {}, f"{where}`over`")
    for name, values in sweep.items():
        if not isinstance(values, list) or not values or _repeated(values):
            raise InputError(f"{where}`over` has {name}: {values!r}: set it to a list of values, each once.")
        taken = [arm for arm, flags in arms.items() if name in flags]
        if taken or name in base:
            raise InputError(f"{where}`{name}` is in `over` and in {taken or '`base`'}: leave one of them out.")
    seeds = content["seeds"]
    if not isinstance(seeds, list) or not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise InputError(f"{where}`seeds` is {seeds!r}: set it to a list of whole numbers from 0 on.")
    if _repeated(seeds):
        raise InputError(f"{where}`seeds` has {_repeated(seeds)} more than once: name each seed once.")
    every, avg_at, dataset = _measure(_mapping(content["measure"], f"{where}`measure`"), where)
    named = {"`base`": base, "`over`": sweep, **{f"arm '{arm}'": flags for arm, flags in arms.items()}}
    for title, flags in named.items():
        for name, value in flags.items():
            if any(each is None for each in _as_list(value)):
                raise InputError(f"{where}{title} has {name}: null: give a value, or leave it out.")
        for name in _OWN:
            if name in flags:
                raise InputError(f"{where}{title} has `{name}`, which the study sets itself: leave it out.")
    accelerate = content.get("accelerate")
    for name, value in {"accelerate": accelerate, "measure.dataset": dataset}.items():
        if not (value is None or isinstance(value, str)):
            raise InputError(f"{where}`{name}` is {value!r}: set it to a name.")
    return Study(base, arms, sweep, seeds, every, avg_at, dataset, accelerate)


def _measure(measure: dict[str, Any], where: str) -> tuple[int, int, str | None]:
    for name in measure:
        if name not in ("every", "avg_at", "dataset"):
            raise InputError(f"{where}`measure` has `{name}`: it takes every, avg_at and dataset.")
    numbers = {name: measure.get(name) for name in ("every", "avg_at")}
    for name, value in numbers.items():
        if type(value) is not int or value < 1:
            raise InputError(f"{where}`measure` has {name}: {value!r}: set it to a whole number from 1 on.")
    return numbers["every"], numbers["avg_at"], measure.get("dataset")


def _mapping(value: Any, title: str) -> dict[str, Any]:
    if not (isinstance(value, dict) and all(isinstance(name, str | int) for name in value)):
        raise InputError(f"{title} is {value!r}: set it to names and values.")
    return {str(name): each for name, each in value.items()}


def _repeated(values: Sequence) -> list:
    return [value for position, value in enumerate(values) if value in values[:position]]
