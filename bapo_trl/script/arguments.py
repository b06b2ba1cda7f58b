"""Flags and recipes of `train_bapo.py`: what cannot be read ends in one line, with the nearest name that is known."""

import difflib
import os
import sys
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import yaml
from trl import TrlParser


class RecipeParser(TrlParser):
    """
    TRL's parser of flags and a YAML file (`--config`), which checks all names before any value.

    What differs from [`~trl.TrlParser`]: a file that is missing or no recipe, and unknown names, end the process with
    code 2 and one line on stderr, as argparse does for values; `--config=PATH` is understood; no flag may be
    abbreviated.
    """

    def __init__(self, dataclass_types: Iterable[Any], **kwargs):
        super().__init__(dataclass_types, allow_abbrev=False, **kwargs)
        self._recipe: str | None = None

    def parse_args_and_config(self, args: Iterable[str] | None = None, *rest, **kwargs):
        args = sys.argv[1:] if args is None else args
        args = [part for arg in args for part in (arg.split("=", 1) if arg.startswith("--config=") else [arg])]
        if "--config" in args:
            self._recipe = next(iter(args[args.index("--config") + 1 :]), "")
            if not os.path.isfile(self._recipe):
                self._refuse(f"`--config` is '{self._recipe}': there is no such file")
            defect = _find_defect(self._recipe)
            if defect is not None:
                self._refuse(f"the recipe {self._recipe} {defect}")
        return super().parse_args_and_config(args, *rest, **kwargs)

    def set_defaults_with_config(self, **config):
        remaining = super().set_defaults_with_config(**config)
        unknown = [flag.removeprefix("--") for flag in remaining[::2]]  # a value follows each
        if unknown:
            self._refuse(f"unknown key in {self._recipe}: {self._with_nearest(unknown)}")
        return remaining

    def parse_known_args(self, args=None, namespace=None):
        namespace, remaining = super().parse_known_args(args, namespace)
        unknown = [argument.partition("=")[0] for argument in remaining if argument.startswith("--")]
        if unknown:
            self._refuse(f"unknown flag: {self._with_nearest(unknown, prefix='--')}")
        if remaining:
            self._refuse(f"'{remaining[0]}' belongs to no flag")
        return namespace, remaining

    def _with_nearest(self, names: list[str], prefix: str = "") -> str:
        known = ["config", *(f.name for settings in self.dataclass_types for f in fields(settings) if f.init)]

        def described(name: str) -> str:
            near = difflib.get_close_matches(name.removeprefix(prefix).replace("-", "_"), known, n=1)
            return f"{name} (the nearest is {prefix}{near[0]})" if near else f"{name} (none is near: --help lists all)"

        return ", ".join(described(name) for name in names)

    def _refuse(self, message: str):
        self.exit(2, f"{self.prog}: error: {message}\n")


def _find_defect(path: str) -> str | None:
    """Return what keeps a file from being a recipe, with the fix; `None` if it is one."""
    example = "write one setting a line, such as `learning_rate: 1.0e-6`"
    try:
        with open(path, encoding="utf-8") as file:
            recipe = yaml.safe_load(file)
    except OSError as error:
        return f"cannot be read ({error.strerror}): check its permissions"
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        return f"is not valid YAML ({' '.join(str(error).split())}): correct it there"
    if recipe is None:
        return f"is empty: {example}"
    if not isinstance(recipe, dict):
        return f"is a {type(recipe).__name__}, not settings by name: {example}"
    for name in recipe:
        if not isinstance(name, str):
            return f"has the key {name!r}, which is no name: {example}"
    env = recipe.get("env", {})
    if not isinstance(env, dict):
        return f"has an `env` that is a {type(env).__name__}: write one variable a line below it, such as `  A: 1`"
    return None
