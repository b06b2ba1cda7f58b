"""Find, read and list recipes (YAML files of settings), and report errors in them."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ...errors import InputError


RECIPES = Path(__file__).resolve().parents[2] / "recipes"
DEMO_FOLDER = "outputs/quickstart"  # `output_dir` in the recipe `quickstart`


def recipe_names() -> list[str]:
    """Return the names of the built-in recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def find_recipe(name: str) -> str | None:
    """Return the path of a recipe: the file itself, or the built-in recipe of that name (`math_7b`), or `None`."""
    path = Path(name)
    if path.is_file():
        return name
    is_name = path.parent in (Path("."), Path("recipes")) and path.suffix in ("", ".yaml")
    return str(RECIPES / f"{path.stem}.yaml") if is_name and path.stem in recipe_names() else None


class _UniqueKeys(yaml.SafeLoader):
    """YAML loader that rejects duplicate keys, of which YAML would use the last."""

    def compose_mapping_node(self, anchor):
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if key.value in seen and key.value != "<<":
                raise yaml.YAMLError(f"the key `{key.value}` is set twice, again in line {key.start_mark.line + 1}")
            seen.add(key.value)
        return node


def read_recipe(name: str) -> dict:
    """Return the settings in a recipe or another YAML file; raise an `InputError` for an invalid file."""
    path = find_recipe(name)
    if path is None:
        raise InputError(
            f"`config` is '{name}', which does not exist: set a YAML file, or a recipe: {', '.join(recipe_names())}."
        )
    try:
        with open(path, "rb") as file:
            recipe = _UniqueKeys(file).get_single_data()
    except yaml.YAMLError as error:
        raise InputError(f"{path} is not valid YAML ({error}): correct the file.") from error
    is_mapping = isinstance(recipe, dict) and all(isinstance(name, str) for name in recipe)
    if not (is_mapping and isinstance(recipe.get("env", {}), dict)):
        raise InputError(
            f"{path} or its `env` is not a mapping of names to values: write one setting per line, such as "
            "`learning_rate: 1.0e-6`."
        )
    return recipe


def look_ahead(arguments: Sequence[str]) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the flags, as text by name, and the recipe from arguments, without importing the slow real parsers."""
    flags = {}
    for argument, following in zip(arguments, [*arguments[1:], "--"], strict=False):
        if argument.startswith("--"):
            name, has_value, value = argument[2:].partition("=")
            flags[name.replace("-", "_")] = value if has_value else "" if following.startswith("--") else following
    return flags, read_recipe(flags["config"]) if "config" in flags else {}


def is_true(value: Any) -> bool:
    """Return whether the value of a flag or a recipe's setting is true; a flag without a value is true."""
    return str(value).lower() in ("", "true", "t", "yes", "y", "1")


def main(arguments: Sequence[str]) -> None:
    """Print the recipes of the package, a line each, with the first line of their file."""
    parser = argparse.ArgumentParser(prog="bapo-trl recipes", description="List the built-in recipes for `--config`.")
    parser.parse_args(arguments)
    width = max(map(len, recipe_names()))
    for name in recipe_names():
        first = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0]
        print(f"{name:<{width}}  {first.removeprefix('#').strip()}")
