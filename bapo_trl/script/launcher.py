"""`accelerate launch` with the exit code of the rank that failed first. By itself it makes a 1 of every failure.

python -m bapo_trl.script.launcher --config_file accelerate_configs/zero3.yaml train_bapo.py --config ...
"""

import subprocess
import sys
from collections.abc import Sequence

from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main(arguments: Sequence[str]) -> None:
    """
    Launch the ranks of this node.

    Args:
        arguments (sequence of `str`):
            Those of `accelerate launch`.

    Raises:
        SystemExit: With the code of the rank that ended first, if it is not 0; 128 plus the number of the signal that
            ended it. A launcher that is sent SIGTERM itself ends with 1, as accelerate does.
    """
    try:
        launch_command(launch_command_parser().parse_args(arguments))
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        _, failure = error.get_first_failure()
        code = failure.exitcode
    except subprocess.CalledProcessError as error:  # a single process
        print(error, file=sys.stderr)
        code = error.returncode
    else:
        return
    raise SystemExit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main(sys.argv[1:])
