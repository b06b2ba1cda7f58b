"""
`accelerate launch` by the name of a configuration, with the exit code of the rank that failed first.

    bapo-trl launch --accelerate zero3 --num_processes 6 train --config math_7b

By itself, `accelerate launch` takes paths alone, those in its files are relative to the current folder, and it makes a
1 of every failure.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import yaml
from accelerate.commands import launch
from accelerate.utils import prepare_simple_launcher_cmd_env
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ..errors import InputError
from .commands import EVALUATE, LAUNCHED, TRAIN
from .recipes import is_dry, look_ahead


PACKAGE = Path(__file__).resolve().parents[1]
CONFIGS = PACKAGE / "accelerate_configs"


def main(arguments: Sequence[str]) -> None:
    """
    Launch the ranks of this node, by the arguments of `accelerate launch`.

    With `--accelerate NAME`, a configuration of the package or the path of one. Instead of a script, `train` or
    `evaluate` of this package.

    Raises:
        InputError: If there is no such script or configuration, or none of DeepSpeed where it names one.
        SystemExit: With the code of the rank that ended first, if it is not 0; 128 plus the number of the signal that
            ended it. A launcher of several ranks that is sent SIGTERM itself ends with 1, as accelerate does. A single
            rank takes the place of its launcher, and gets its signals.
    """
    args = read_arguments(arguments)
    if not (args.module or args.no_python or Path(args.training_script).exists()):
        raise InputError(f"'{args.training_script}' is neither train nor evaluate, nor a script here: correct it.")
    plans = False
    with suppress(InputError):  # of a recipe, reported by the command
        plans = args.training_script == "bapo_trl" and is_dry(*look_ahead(args.training_script_args[1:]))
    if plans:
        return _dry_run(args)
    launch.simple_launcher = _become_rank
    try:
        launch.launch_command(args)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        code = failure.exitcode
        if args.training_script != "bapo_trl" or code not in (1, 2):  # with these, a rank has said why
            print(error, file=sys.stderr)
    except subprocess.CalledProcessError as error:  # DeepSpeed's launcher of several nodes
        print(error, file=sys.stderr)
        code = error.returncode
    else:
        return
    raise SystemExit(code if code >= 0 else 128 - code)


def _dry_run(args: argparse.Namespace) -> None:
    """Print what the processes would do, from this one."""
    from .planning import print_plan

    validated, _, _ = launch._validate_launch_command(args)
    name, *flags = args.training_script_args
    print_plan(flags, EVALUATE if name == "evaluate" else TRAIN, validated.num_processes or 1)


def launch_of(accelerate: str) -> argparse.Namespace:
    """Return what a configuration launches, by its name or path, as accelerate completes it; errors as in [`main`]."""
    validated, _, _ = launch._validate_launch_command(read_arguments(["--accelerate", accelerate, "train"]))
    return validated


def read_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of `accelerate launch` that these stand for; errors as in [`main`]."""
    parser: Any = launch.launch_command_parser()
    parser.prog, parser.description = "bapo-trl launch", "Train or evaluate on several GPUs or nodes."
    parser.usage = "%(prog)s [--accelerate NAME] [FLAGS OF accelerate launch] {train,evaluate,SCRIPT} [ITS FLAGS]"
    parser.formatter_class = argparse.HelpFormatter  # accelerate's own leaves out what has no flag here
    parser.add_argument(
        "--accelerate", metavar="NAME", help=f"configuration: {', '.join(config_names())}, or the path of a file"
    )
    args = parser.parse_args(arguments)
    if args.accelerate is not None:
        if args.config_file is not None:
            raise InputError(
                f"`--accelerate` is '{args.accelerate}' and `--config_file` '{args.config_file}': leave one out."
            )
        args.config_file = str(_find_config(args.accelerate))
        args.nondefault.add("config_file")
    if args.config_file is not None and "deepspeed_config_file" not in args.nondefault:
        named = _deepspeed_file_of(Path(args.config_file))
        if named is not None:
            args.deepspeed_config_file = str(_find_deepspeed_file(named, Path(args.config_file)))
            args.nondefault.add("deepspeed_config_file")
    if args.training_script in LAUNCHED and not args.module:
        args.training_script_args = [args.training_script, *args.training_script_args]
        args.training_script, args.module = "bapo_trl", True
        args.nondefault.add("module")
    return args


def config_names() -> list[str]:
    """Return the names of the package's configurations."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def _find_config(name: str) -> Path:
    shipped = CONFIGS / f"{name}.yaml"
    if shipped.is_file() or Path(name).is_file():
        return shipped if shipped.is_file() else Path(name)
    raise InputError(
        f"`--accelerate` is '{name}': there is no such file; the package has {', '.join(config_names())}."
    )


def _deepspeed_file_of(config: Path) -> str | None:
    if not config.is_file():  # accelerate says so
        return None
    try:
        content = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{config} is no configuration of accelerate ({reason}): correct it there.") from error
    settings = content.get("deepspeed_config") if isinstance(content, dict) else None
    named = settings.get("deepspeed_config_file") if isinstance(settings, dict) else None
    return None if named == "none" else named


def _find_deepspeed_file(named: str, config: Path) -> Path:
    """Return the DeepSpeed file that a configuration names: relative to the current folder, else to its own."""
    own = config.resolve().parent
    places = [own.parent] if own == CONFIGS else [Path.cwd(), own, own.parent]
    for place in places:
        if (place / named).is_file():
            return place / named
    raise InputError(
        f"{config} names '{named}' (`deepspeed_config_file`), which is neither in the current folder nor beside it: "
        "give `--deepspeed_config_file`."
    )


def _become_rank(args: argparse.Namespace) -> NoReturn:
    """Take the place of accelerate's launcher of one process, which would wait for it and pass no signal on."""
    command, environment = prepare_simple_launcher_cmd_env(args)
    if args.gpu_ids in (None, "all"):  # of several that it sees, TRL would spread the model over all
        environment["CUDA_VISIBLE_DEVICES"] = environment.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    sys.stdout.flush()
    os.execvpe(command[0], command, environment)


if __name__ == "__main__":
    main(sys.argv[1:])
