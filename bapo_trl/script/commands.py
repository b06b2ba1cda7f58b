"""The commands that train or evaluate, and where they begin: no trainer is imported for a help text."""

import argparse
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..errors import InputError
from .recipes import read_recipe, set_environment


@dataclass(frozen=True)
class Command:
    """What was typed to come here."""

    name: str
    description: str  # begin of the help text


_TRAINING = """
Train a model with BAPO.

The embedded arithmetic task, on a laptop without a GPU:

    {command}

One of the recipes ({command} --config quickstart), or your own; flags override its values. In several processes:

    {launch} --config math_7b --learning_rate 1e-6

Your own data and reward, all settings from the command line:

    {command} --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name prompts.jsonl \\
        --reward_funcs my_rewards.is_short --output_dir out --steps_per_generation 8 --num_iterations 2

Columns of other names, and evaluation before and after:

    {command} --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name math.jsonl \\
        --prompt_column question --answer_column answer --reward_funcs accuracy_reward --eval_fraction 0.1 \\
        --extract_answer boxed --output_dir out

A saved model or adapter, evaluated alone:

    {command} --config recipes/aime24.yaml --model_name_or_path out

`--help` lists the settings of this package. `--help-all` lists all: those of `GRPOConfig`, of TRL's `ModelConfig`
(LoRA flags among them) and of TRL's dataset mixtures as well.
"""
_EVALUATION = """
Evaluate a model: what `bapo-trl train` does with `--do_train false`, and with the same settings. Those of a recipe
that are for its training do not count.

A saved model or adapter on AIME 2024:

    bapo-trl evaluate --config recipes/aime24.yaml --model_name_or_path out

On your own prompts:

    bapo-trl evaluate --model_name_or_path out --eval_dataset prompts.jsonl --reward_funcs my_rewards.is_short \\
        --num_generations_eval 4 --output_dir evaluation
"""

_LAUNCH = "bapo-trl launch --accelerate zero3 --num_processes 6"
SCRIPT = Command("train_bapo.py", _TRAINING.format(command="python train_bapo.py", launch=f"{_LAUNCH} train_bapo.py"))
TRAIN = Command("bapo-trl train", _TRAINING.format(command="bapo-trl train", launch=f"{_LAUNCH} train"))
EVALUATE = Command("bapo-trl evaluate", _EVALUATION)
LAUNCHED = ("train", "evaluate")
"""Commands that `bapo-trl launch` takes in place of a script."""


def asks_for_dry_run(arguments: Sequence[str]) -> bool:
    """Return whether flags, or else their recipe, ask for a dry run, before they are parsed."""
    asked, recipe = _look_ahead(arguments)
    return str(recipe.get("dry_run") if asked is None else asked).lower() in ("true", "t", "yes", "y", "1")


def train(arguments: Sequence[str], command: Command = TRAIN) -> None:
    """Run [`~training.main`]; its help needs the settings alone, and nothing of a training is loaded for it."""
    _set_environment_of_recipe(arguments)
    if {"-h", "--help", "--help-all", "--help_all"} & set(arguments):
        from .command_line import parse_arguments

        parse_arguments(arguments, command)
    from .training import main

    main(arguments, command)


def evaluate(arguments: Sequence[str]) -> None:
    """Evaluate, and train nothing."""
    train(arguments, EVALUATE)


def launch(arguments: Sequence[str]) -> None:
    """Run [`~launcher.main`]."""
    place = next((place for place, argument in enumerate(arguments) if argument in LAUNCHED), len(arguments))
    _set_environment_of_recipe(arguments[place:])
    from .launcher import main

    main(arguments)


def _set_environment_of_recipe(arguments: Sequence[str]) -> None:
    """Set the variables of a recipe's `env`. Libraries such as huggingface_hub read theirs when they are imported."""
    with suppress(InputError):  # reported when the flags are parsed
        set_environment(_look_ahead(arguments)[1].get("env", {}))


def _look_ahead(arguments: Sequence[str]) -> tuple[str | None, dict[str, Any]]:
    """Return the value of `--dry_run`, and the content of the recipe, without the libraries that parsing needs."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--dry_run", "--dry-run", nargs="?", const="true")
    parser.add_argument("--config", nargs="?")
    flags, _ = parser.parse_known_args(arguments)
    recipe: dict[str, Any] = {}
    if flags.config is not None:
        with suppress(InputError):  # reported when the flags are parsed
            recipe = read_recipe(flags.config)
    return flags.dry_run, recipe
