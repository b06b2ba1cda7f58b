"""Recipes, YAML files of settings: those of the package by name, and what keeps a file from being one."""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ..errors import InputError


RECIPES = Path(__file__).resolve().parents[1] / "recipes"
DEMO_FOLDER = "outputs/quickstart"  # of the recipe `quickstart`


def recipe_names() -> list[str]:
    """Return the names of the package's recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def find_recipe(name: str) -> str | None:
    """Return the path of a recipe: the file itself, or else the package's of that name (`math_7b`), or `None`."""
    if os.path.isfile(name):
        return name
    path = Path(name)
    is_name = path.parent in (Path("."), Path("recipes")) and path.suffix in ("", ".yaml")
    return str(RECIPES / f"{path.stem}.yaml") if is_name and path.stem in recipe_names() else None


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that a mapping has twice, of which YAML takes the last."""

    def compose_mapping_node(self, anchor):
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.YAMLError(f"the key `{key.value}` is there twice, again in line {key.start_mark.line + 1}")
            seen.add(key.value)
        return node


def read_recipe(name: str) -> dict:
    """Return what stands in a recipe, or in another YAML file; refuse what is none, with the fix (`InputError`)."""
    path = find_recipe(name)
    if path is None:
        raise InputError(
            f"`config` is '{name}': there is no such file; the recipes of the package are {', '.join(recipe_names())}."
        )
    example = "write one setting a line, such as `learning_rate: 1.0e-6`"
    try:
        with open(path, encoding="utf-8") as file:
            recipe = _UniqueKeys(file).get_single_data()
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): check its permissions.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid YAML ({' '.join(str(error).split())}): correct it there.") from error
    if recipe is None:
        raise InputError(f"{path} is empty: {example}.")
    if not isinstance(recipe, dict):
        raise InputError(f"{path} is a {type(recipe).__name__}, not settings by name: {example}.")
    for key in recipe:
        if not isinstance(key, str):
            raise InputError(f"{path} has the key {key!r}, which is no name: {example}.")
    env = recipe.get("env", {})
    if not isinstance(env, dict):
        raise InputError(
            f"{path} has an `env` that is a {type(env).__name__}: write one variable a line below it, such as "
            "`  A: 1`."
        )
    return recipe


def set_environment(variables: Mapping[str, Any]) -> None:
    """Set the environment variables of a recipe's `env`; refuse what cannot be one (`InputError`)."""
    for name, value in variables.items():
        try:
            os.environ[name] = str(value)
        except (TypeError, ValueError, OSError) as error:
            raise InputError(f"`env` has {name!r}: {value!r}, which cannot be set ({error}): correct it.") from error


def look_ahead(arguments: Sequence[str]) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the flags, as text by name, and the recipe among arguments, before the libraries that parse them load."""
    flags = {}
    for argument, following in zip(arguments, [*arguments[1:], "--"], strict=False):
        if argument.startswith("--"):
            name, has_value, value = argument[2:].partition("=")
            flags[name.replace("-", "_")] = value if has_value else "" if following.startswith("--") else following
    return flags, read_recipe(flags["config"]) if "config" in flags else {}


def is_dry(flags: Mapping[str, str], recipe: Mapping[str, Any]) -> bool:
    """Return whether flags, or else their recipe, ask for a dry run."""
    return str(flags.get("dry_run", recipe.get("dry_run", False))).lower() in ("", "true", "t", "yes", "y", "1")


def describe_recipe(name: str) -> str:
    """Return what a recipe of the package is for: its first line, a comment."""
    with open(RECIPES / f"{name}.yaml", encoding="utf-8") as file:
        return file.readline().removeprefix("#").strip()


def main(arguments: Sequence[str]) -> None:
    """Print the recipes of the package, a line each."""
    parser = argparse.ArgumentParser(prog="bapo-trl recipes", description="List the recipes for `--config`.")
    parser.parse_args(arguments)
    width = max(map(len, recipe_names()))
    for name in recipe_names():
        print(f"{name:<{width}}  {describe_recipe(name)}")
