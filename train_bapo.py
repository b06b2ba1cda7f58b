"""
Train a model, as `bapo-trl train` does, from a checkout of the repository.

`python train_bapo.py --help` lists the flags. In several processes: `accelerate launch train_bapo.py ...`.
"""

import sys
from collections.abc import Sequence

from bapo_trl.cli import train
from bapo_trl.script.commands import SCRIPT
from bapo_trl.script.failures import run_command


def main(arguments: Sequence[str]) -> None:
    """Train with the flags from the command line."""
    train(arguments, SCRIPT)


if __name__ == "__main__":
    run_command(main, sys.argv[1:], SCRIPT.name)
