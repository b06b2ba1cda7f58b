"""Where `bapo-trl train` and `bapo-trl evaluate` begin: help texts need no trainer, and none is imported for them."""

from collections.abc import Sequence

from .commands import EVALUATE, TRAIN, Command


def train(arguments: Sequence[str], command: Command = TRAIN) -> None:
    """Run [`~training.main`]; its help needs the settings alone, and nothing of a training is loaded for it."""
    if {"-h", "--help", "--help-all", "--help_all"} & set(arguments):
        from .command_line import parse_arguments

        parse_arguments(arguments, command)
    from .training import main

    main(arguments, command)


def evaluate(arguments: Sequence[str]) -> None:
    """Evaluate, and train nothing."""
    train([*arguments, "--do_train", "false"], EVALUATE)
