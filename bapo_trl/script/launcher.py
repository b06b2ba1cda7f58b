"""`accelerate launch` with the exit code of the rank that failed first. By itself it makes a 1 of every failure.

python -m bapo_trl.script.launcher --config_file accelerate_configs/zero3.yaml train_bapo.py --config ...
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import NoReturn

from accelerate.commands import launch
from accelerate.utils import prepare_simple_launcher_cmd_env
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main(arguments: Sequence[str]) -> None:
    """
    Launch the ranks of this node.

    Args:
        arguments (sequence of `str`):
            Those of `accelerate launch`.

    Raises:
        SystemExit: With the code of the rank that ended first, if it is not 0; 128 plus the number of the signal that
            ended it. A launcher of several ranks that is sent SIGTERM itself ends with 1, as accelerate does. A single
            rank takes the place of its launcher, and gets its signals.
    """
    launch.simple_launcher = _become_rank
    try:
        launch.launch_command(launch.launch_command_parser().parse_args(arguments))
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        _, failure = error.get_first_failure()
        code = failure.exitcode
    except subprocess.CalledProcessError as error:  # DeepSpeed's launcher of several nodes
        print(error, file=sys.stderr)
        code = error.returncode
    else:
        return
    raise SystemExit(code if code >= 0 else 128 - code)


def _become_rank(args: argparse.Namespace) -> NoReturn:
    """Take the place of accelerate's launcher of one process, which would wait for it and pass no signal on."""
    command, environment = prepare_simple_launcher_cmd_env(args)
    sys.stdout.flush()
    os.execvpe(command[0], command, environment)


if __name__ == "__main__":
    main(sys.argv[1:])
