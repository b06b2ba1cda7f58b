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
from .script.failures import FLAG, run_command
from .script.recipes import is_true, look_ahead


COMMANDS = {
    "train": ("bapo_trl.cli:train", "train a model"),
    "evaluate": ("bapo_trl.cli:evaluate", "measure the accuracy of a model"),
    "recipes": ("bapo_trl.script.recipes:main", "list the built-in recipes for `--config`"),
    "compare": ("bapo_trl.compare.command:main", "compare several methods on one task, over several seeds"),
    "report": ("bapo_trl.report.command:main", "plot the metrics of runs, and check their health"),
    "launch": ("bapo_trl.cli:launch", "train or evaluate on several GPUs or nodes, with accelerate"),
    "serve": ("bapo_trl.script.serving:main", "start a vLLM server that generates for the trainer"),
}
"""The function that runs each subcommand with its arguments, and the purpose of the subcommand."""


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
        description="Off-policy reinforcement learning for TRL: train, evaluate and compare language models.",
        epilog="`bapo-trl COMMAND --help` lists the settings of a command.",
    )
    parser.add_argument("--version", action="version", version=f"bapo-trl {__version__}")
    parser.add_argument(FLAG, action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, purpose) in COMMANDS.items():
        commands.add_parser(name, help=purpose, add_help=False)

    def run(kept: Sequence[str]) -> int | None:
        name, rest = parser.parse_args(kept[:1]).command, kept[1:]
        if name == "launch":  # what stands behind a script is the script's, `--traceback` too
            rest = list(arguments)
            rest.remove(name)
        return resolve_name(COMMANDS[name][0])(rest)

    named = [argument for argument in arguments if argument != FLAG][:1]
    return run_command(run, arguments, " ".join([parser.prog, *(name for name in named if name in COMMANDS)]))


def train(arguments: Sequence[str], command: Command = TRAIN) -> None:
    """Do what flags and a recipe ask for, see [`~script.training.run`]; in a dry run, say what that would be."""
    if _prepare(arguments):
        from .script.plan import print_plan

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
