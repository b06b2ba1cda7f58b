"""
Train a model with BAPO: `bapo-trl train` of the package, in a checkout.

`python train_bapo.py --help` says how. In several processes: `accelerate launch train_bapo.py ...`.
"""

import sys
from collections.abc import Sequence

from bapo_trl.cli import train
from bapo_trl.script.commands import SCRIPT
from bapo_trl.script.failures import run_command


def main(arguments: Sequence[str]) -> None:
    """Train with the flags of the command line."""
    train(arguments, SCRIPT)


if __name__ == "__main__":
    run_command(main, sys.argv[1:], SCRIPT.name)
