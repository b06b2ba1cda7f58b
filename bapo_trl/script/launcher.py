"""
`bapo-trl launch`: run `accelerate launch` with a named configuration, and exit with the first failed rank's code.

    bapo-trl launch --accelerate zero3 --num_processes 6 train --config math_7b

`accelerate launch` itself takes only paths, and exits with 1 after any failure.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import yaml
from accelerate.commands import launch
from accelerate.utils import prepare_simple_launcher_cmd_env
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ..errors import InputError
from .commands import EVALUATE, TRAIN
from .failures import FLAG, INTERRUPTED


if TYPE_CHECKING:
    from .memory import Sharding

PACKAGE = Path(__file__).resolve().parents[1]
CONFIGS = {path.stem: path for path in sorted((PACKAGE / "accelerate_configs").glob("*.yaml"))}


def main(arguments: Sequence[str], plans: bool = False) -> None:
    """
    Launch the ranks of this node with the arguments of `accelerate launch`; with `plans`, print what they would do.

    Raises:
        InputError: If the script or the configuration does not exist.
        SystemExit: With the exit code of the rank that failed first, or 128 plus the number of the signal that ended
            it or this launcher. A single rank replaces the launcher process, and receives its signals.
    """
    args = read_arguments(arguments)
    is_ours = args.training_script == "bapo_trl"
    if not (args.module or args.no_python or Path(args.training_script).exists()):
        raise InputError(f"'{args.training_script}' does not exist: use train, evaluate, or the path of a script.")
    if is_ours and plans:
        from .plan import print_plan

        validated, _, _ = launch._validate_launch_command(args)
        name, *flags = (each for each in args.training_script_args if each != FLAG)
        processes = validated.num_processes or 1
        command = EVALUATE if name == "evaluate" else TRAIN
        return print_plan(flags, command, processes, _sharding(validated, processes))
    if is_ours and args.traceback:
        args.training_script_args.append(FLAG)
    launch.simple_launcher = _become_rank
    try:
        launch.launch_command(args)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        code = failure.exitcode
        if not is_ours or code not in (1, 2, INTERRUPTED):  # with these codes, a rank has printed the reason
            print(error, file=sys.stderr)
    except SignalException as error:  # sent on to the ranks, which have said what they did
        code = -error.sigval
    except subprocess.CalledProcessError as error:  # DeepSpeed's launcher of several nodes
        print(error, file=sys.stderr)
        code = error.returncode
    else:
        return
    raise SystemExit(code if code >= 0 else 128 - code)


def launch_of(accelerate: str) -> argparse.Namespace:
    """Return the completed arguments of `accelerate launch` for a configuration; errors as in [`main`]."""
    validated, _, _ = launch._validate_launch_command(read_arguments(["--accelerate", accelerate, "train"]))
    return validated


def read_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of `bapo-trl launch` into arguments of `accelerate launch`; errors as in [`main`]."""
    parser: Any = launch.launch_command_parser()
    parser.prog = "bapo-trl launch"
    parser.description = "Train or evaluate on several GPUs or nodes, with `accelerate launch`."
    parser.usage = "%(prog)s [--accelerate NAME] [FLAGS OF accelerate launch] {train,evaluate,SCRIPT} [ITS FLAGS]"
    parser.formatter_class = argparse.HelpFormatter  # accelerate's own hides flags that are not given here
    parser.add_argument(
        "--accelerate", metavar="NAME", help=f"accelerate configuration: {', '.join(CONFIGS)}, or the path of a file"
    )
    parser.add_argument(FLAG, action="store_true", help="show the traceback of an error")
    args = parser.parse_args(arguments)
    if args.accelerate in CONFIGS:
        _set(args, config_file=str(CONFIGS[args.accelerate]))
        # The path is relative to the package; accelerate would take it relative to the current folder
        settings = yaml.safe_load(CONFIGS[args.accelerate].read_text()).get("deepspeed_config", {})
        if "deepspeed_config_file" in settings and "deepspeed_config_file" not in args.nondefault:
            _set(args, deepspeed_config_file=str(PACKAGE / settings["deepspeed_config_file"]))
    elif args.accelerate is not None:
        if not Path(args.accelerate).is_file():
            raise InputError(
                f"`--accelerate` is '{args.accelerate}', which does not exist: set a file, or {', '.join(CONFIGS)}."
            )
        _set(args, config_file=args.accelerate)
    if args.training_script in ("train", "evaluate") and not args.module:
        args.training_script_args = [args.training_script, *args.training_script_args]
        _set(args, training_script="bapo_trl", module=True)
    return args


def _sharding(args: argparse.Namespace, processes: int) -> "Sharding":
    """Return how a launch with these completed arguments divides the model over the processes."""
    from .memory import Sharding

    if args.use_deepspeed:
        path = args.deepspeed_config_file
        zero = json.loads(Path(path).read_text())["zero_optimization"] if path else {"stage": args.zero_stage}
        return Sharding.of_zero(zero, processes)
    return Sharding(processes, stage=3 if args.use_fsdp else 0)


def _set(args: argparse.Namespace, **values: Any) -> None:
    """Set arguments as if given on the command line: a configuration does not replace values in `nondefault`."""
    vars(args).update(values)
    args.nondefault.update(values)


def _become_rank(args: argparse.Namespace) -> NoReturn:
    """Replace this process by a single rank, as accelerate's launcher would wait and not forward signals."""
    command, environment = prepare_simple_launcher_cmd_env(args)
    if args.gpu_ids in (None, "all"):  # TRL would spread the model over all visible GPUs
        environment["CUDA_VISIBLE_DEVICES"] = environment.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    sys.stdout.flush()
    os.execvpe(command[0], command, environment)


if __name__ == "__main__":
    main(sys.argv[1:])
