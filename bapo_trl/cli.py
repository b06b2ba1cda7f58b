"""The command `bapo-trl`. A sub-command is imported when it is called."""

import argparse
import os
import sys
from collections.abc import Sequence
from pkgutil import resolve_name

from . import __version__
from .script.commands import EVALUATE, TRAIN, Command
from .script.failures import FLAG, run_command
from .script.settings.recipes import is_true, look_ahead


COMMANDS = {
    "train": ("bapo_trl.cli:train", "train a model"),
    "evaluate": ("bapo_trl.cli:evaluate", "measure the accuracy of a model"),
    "recipes": ("bapo_trl.script.settings.recipes:main", "list the built-in recipes for `--config`"),
    "compare": ("bapo_trl.compare.command:main", "compare several methods on one task, over several seeds"),
    "report": ("bapo_trl.report.command:main", "plot the metrics of runs, and check their health"),
    "serve": ("bapo_trl.script.serving:main", "start a vLLM server that generates for the trainer"),
}
"""The function that runs each subcommand with its arguments, and the purpose of the subcommand."""

_STARTS = {"accelerate_config", "num_processes"}


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
        if FLAG in arguments and _STARTS & look_ahead(rest)[0].keys():
            rest = [*rest, FLAG]  # for the ranks
        return resolve_name(COMMANDS[name][0])(rest)

    named = [argument for argument in arguments if argument != FLAG][:1]
    return run_command(run, arguments, " ".join([parser.prog, *(name for name in named if name in COMMANDS)]))


def train(arguments: Sequence[str], command: Command = TRAIN) -> None:
    """
    Do what flags and a recipe ask for, see [`~script.run.train.run`]; in a dry run, say what that would be.

    With a flag of `_STARTS`, start processes that do it.
    """
    flags, recipe = look_ahead(arguments)
    # Before libraries are imported that read them then
    os.environ.update({name: str(value) for name, value in recipe.get("env", {}).items()})
    plans = is_true(flags.get("dry_run", recipe.get("dry_run", False)))
    processes = sharding = None  # those of this process' launcher
    if _STARTS & flags.keys() and "help" not in flags:
        from .script import launcher

        launch = launcher.read_arguments(arguments, command)
        if not plans:
            return launcher.start(launch)
        arguments, processes, sharding = launcher.ranks_of(launch)
    if plans:
        from .script.plan import print_plan

        return print_plan(arguments, command, processes, sharding)
    from .script.settings.parser import parse_arguments

    settings = parse_arguments(arguments, command)  # a help text ends here, before a trainer is imported
    from .script.run.train import run

    run(settings)


def evaluate(arguments: Sequence[str]) -> None:
    """Evaluate, and train nothing."""
    train(arguments, EVALUATE)
