"""
`--accelerate_config` and `--num_processes` of `bapo-trl train` and `evaluate`: start processes, as `trl grpo` does.

    bapo-trl train --accelerate_config zero3 --num_processes 6 --config math_7b

`accelerate launch` would exit with 1 after any failure; here the first failed rank's code is handed on. A script of
one's own gets the same from `python -m bapo_trl.script.launcher`, which takes the flags of `accelerate launch`.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import yaml
from accelerate.commands import launch
from accelerate.utils import prepare_simple_launcher_cmd_env
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ..errors import InputError
from .commands import EVALUATE, TRAIN, Command
from .failures import FLAG, INTERRUPTED, reject


if TYPE_CHECKING:
    from .memory import Sharding

PACKAGE = Path(__file__).resolve().parents[1]
_OF_TRL = Path(find_spec("trl").origin).parent
CONFIGS = {
    path.stem: path for folder in (_OF_TRL, PACKAGE) for path in sorted((folder / "accelerate_configs").glob("*.yaml"))
}
"""The configurations of TRL and of this package by name. Those of this package leave `bf16` to the trainer."""

SETTINGS_TOO = ("debug", "gradient_accumulation_steps")
"""Flags of `accelerate launch` that are settings of the trainer, too: they are read as the latter."""


def start(args: argparse.Namespace) -> None:
    """
    Run `accelerate launch` with its arguments.

    Raises:
        SystemExit: With the exit code of the rank that failed first, or 128 plus the number of the signal that ended
            it or this launcher. A single rank replaces the launcher process, and receives its signals.
    """
    launch.simple_launcher = _become_rank
    try:
        launch.launch_command(args)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        code = failure.exitcode
        is_ours = args.training_script == "bapo_trl"
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
    """Return the completed arguments of `accelerate launch` for a configuration."""
    validated, _, _ = launch._validate_launch_command(read_arguments(["--accelerate_config", accelerate]))
    return validated


def read_arguments(arguments: Sequence[str], command: Command = TRAIN) -> argparse.Namespace:
    """
    Return arguments of `accelerate launch` for those of a command, of which the ranks get the others.

    Raises:
        InputError: If the configuration does not exist.
    """
    parser: Any = launch.launch_command_parser()
    parser.allow_abbrev = False
    parser.error = lambda message: reject(command.name, message)
    parser.add_argument("--accelerate_config")
    parser._actions = [action for action in parser._actions if action.option_strings]  # without the script
    for option in list(parser._option_string_actions):
        if option.lstrip("-").replace("-", "_") in (*SETTINGS_TOO, "h", "help"):
            del parser._option_string_actions[option]
    args, flags = parser.parse_known_args(arguments)
    name = "evaluate" if command is EVALUATE else "train"
    _set(args, training_script="bapo_trl", module=True, training_script_args=[name, *flags])
    if args.accelerate_config is None:
        return args
    config = Path(args.accelerate_config)
    if not config.is_file():
        config = CONFIGS.get(args.accelerate_config, config)
        if not config.is_file():
            known = ", ".join(sorted(CONFIGS))
            raise InputError(f"`accelerate_config` is '{config}', which does not exist: set a file, or {known}.")
        # The path is relative to the package; accelerate would take it relative to the current folder
        settings = yaml.safe_load(config.read_text()).get("deepspeed_config", {})
        if "deepspeed_config_file" in settings and "deepspeed_config_file" not in args.nondefault:
            _set(args, deepspeed_config_file=str(PACKAGE / settings["deepspeed_config_file"]))
    _set(args, config_file=str(config))
    return args


def ranks_of(args: argparse.Namespace) -> tuple[list[str], int, "Sharding"]:
    """Return the flags of the ranks of a launch, their number, and how they divide the model."""
    from .memory import Sharding

    validated, _, _ = launch._validate_launch_command(args)
    flags, processes = [each for each in args.training_script_args[1:] if each != FLAG], validated.num_processes or 1
    if validated.use_deepspeed:
        path = validated.deepspeed_config_file
        zero = json.loads(Path(path).read_text())["zero_optimization"] if path else {"stage": validated.zero_stage}
        return flags, processes, Sharding.of_zero(zero, processes)
    return flags, processes, Sharding(processes, stage=3 if validated.use_fsdp else 0)


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
    start(launch.launch_command_parser().parse_args())
