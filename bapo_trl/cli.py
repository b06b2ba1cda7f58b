"""The command `bapo-trl`. A sub-command is imported when it is called."""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pkgutil import resolve_name

from . import __version__
from .errors import InputError
from .script.commands import EVALUATE, TRAIN, Command
from .script.failures import run_command
from .script.recipes import is_true, look_ahead


COMMANDS = {
    "train": ("bapo_trl.cli:train", "train a model with BAPO"),
    "evaluate": ("bapo_trl.cli:evaluate", "count how many of a model's answers are right"),
    "recipes": ("bapo_trl.script.recipes:main", "list the recipes of the package, for `--config`"),
    "compare": ("bapo_trl.compare.command:main", "train with several methods, and say which ends highest"),
    "report": ("bapo_trl.report.command:main", "draw what runs logged, and say what is not healthy"),
    "launch": ("bapo_trl.cli:launch", "train on several GPUs or nodes, with accelerate"),
    "serve": ("bapo_trl.script.serving:main", "serve a model with vLLM, to sample from while training"),
}
"""The function that takes what stands behind a sub-command, and what the sub-command is for."""


def main(arguments: Sequence[str] | None = None) -> int | None:
    """
    Run a sub-command with its arguments, by default those of the process; return the exit status, `None` for success.

    Raises:
        SystemExit: With 2 and the known sub-commands on stderr for one that is not known; as in
            [`~script.failures.run_command`] for what the sub-command raises.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="bapo-trl",
        description="BAPO (arXiv 2510.18927): reinforcement learning of language models on stale samples.",
        epilog="`bapo-trl COMMAND --help` tells of its settings; `--traceback` shows where an error comes from.",
    )
    parser.add_argument("--version", action="version", version=f"bapo-trl {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, purpose) in COMMANDS.items():
        commands.add_parser(name, help=purpose, add_help=False)
    command = parser.parse_args(arguments[:1]).command

    def run(rest: Sequence[str]) -> int | None:
        # What stands behind the script is the script's, `--traceback` too
        return resolve_name(COMMANDS[command][0])(arguments[1:] if command == "launch" else rest)

    return run_command(run, arguments[1:], f"{parser.prog} {command}")


def train(arguments: Sequence[str], command: Command = TRAIN) -> None:
    """Do what flags and a recipe ask for, see [`~script.training.run`]; in a dry run, say what that would be."""
    if _prepare(arguments):
        from .script.planning import print_plan

        return print_plan(arguments, command)
    from .script.command_line import parse_arguments

    settings = parse_arguments(arguments, command)  # a help text ends here, before a trainer is imported
    from .script.training import run

    run(settings)


def evaluate(arguments: Sequence[str]) -> None:
    """Evaluate, and train nothing."""
    train(arguments, EVALUATE)


def launch(arguments: Sequence[str]) -> None:
    """Train or evaluate in several processes, with the variables of the recipe."""
    plans = False
    with suppress(InputError):  # reported by the command
        plans = _prepare(arguments)
    from .script.launcher import main

    main(arguments, plans)


def _prepare(arguments: Sequence[str]) -> bool:
    """Set the variables of the recipe, before libraries are imported that read theirs then; tell if the run is dry."""
    flags, recipe = look_ahead(arguments)
    os.environ.update({name: str(value) for name, value in recipe.get("env", {}).items()})
    return is_true(flags.get("dry_run", recipe.get("dry_run", False)))
