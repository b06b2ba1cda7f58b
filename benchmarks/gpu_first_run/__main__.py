"""
The first run on a GPU: one command, no download, no weights.

    python -m benchmarks.gpu_first_run --output first_run.json
    python -m benchmarks.gpu_first_run --output first_run.json --continue first_run.json
    python -m benchmarks.gpu_first_run --table first_run.json

Needs torch, transformers, trl, datasets, peft and accelerate. Models are random weights of the shapes of Qwen2.5 0.5B
and 7B. Each part runs in a process of its own, the most important one first, and begins no case after its time limit.
The file is written anew after each case, so that it is whole wherever the command is cut. `--device cpu --sizes tiny`
tries the command itself, in half a minute.
"""

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.gpu_first_run.parts import PARTS, Setup
from benchmarks.gpu_first_run.results_file import PASSED_LIMIT, run_part, write
from benchmarks.gpu_first_run.shapes import SIZES
from benchmarks.gpu_first_run.table import render


SEED = 0
PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft", "datasets", "numpy")
NOT_BEGUN, BEGUN = "not begun", "begun"
DONE, CUT, FAILED = "done", "cut at its time limit", "ended by itself"


def describe_machine(device: str) -> dict[str, Any]:
    """Return device, driver and versions. No driver is woken in this process, whose children are to use the device."""
    name, driver = platform.processor() or platform.machine(), None
    if device == "cuda":
        asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        name, driver = (
            subprocess.run(asked, check=True, capture_output=True, text=True).stdout.split("\n")[0].split(", ")
        )
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    return {"device": name, "driver": driver, "python": platform.python_version(), **versions}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="file to write")
    parser.add_argument("--continue", dest="old", type=Path, metavar="OLD", help="file of a call that was cut")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the tables of docs/gpu.md from a file")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--sizes", choices=sorted(SIZES), default="full")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART",
                        help=f"of {', '.join(PARTS)}; all by default")  # fmt: skip
    return parser


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    if args.table is not None:
        print(render(json.loads(args.table.read_text())))
        return
    if args.output is None:
        parser.error("give --output, or --table")

    asked = {"device": args.device, "sizes": args.sizes, "seed": SEED}
    content: dict[str, Any] = {"asked": asked, "parts": {}}
    if args.old is not None:
        content = json.loads(args.old.read_text())
        if content["asked"] != asked:
            parser.error(f"{args.old} was made with {content['asked']}, not with {asked}")
    content["date"], content["machine"] = date.today().isoformat(), describe_machine(args.device)
    content["command"] = "python -m benchmarks.gpu_first_run " + " ".join(
        Path(argument).name if Path(argument).is_absolute() else argument for argument in sys.argv[1:]
    )
    for name in args.parts:
        content["parts"].setdefault(name, {"status": NOT_BEGUN, "cases": {}})
    write(content, args.output)

    # A forked child has everything imported; but CUDA, should an import have woken it, goes to no forked child
    processes = multiprocessing.get_context("fork" if args.device == "cpu" else "spawn")
    if args.device == "cuda":  # one, of those that are there
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    setup = Setup(args.device, args.sizes, SEED)
    for name in args.parts:
        part = PARTS[name]
        if not part.runs_on(args.device):
            status = f"null: needs a GPU, not {args.device}"
        else:
            _set_status(args.output, name, BEGUN)
            child = processes.Process(target=run_part, args=(name, setup, args.output))
            child.start()
            child.join(3 * part.limit_s)  # it ends by itself after the case that passes the limit
            if child.is_alive():
                child.kill()
                child.join()
                status = CUT
            else:
                status = {0: DONE, PASSED_LIMIT: CUT}.get(child.exitcode, f"{FAILED}, exit code {child.exitcode}")
        _set_status(args.output, name, status)
        print(f"{name}: {status}", flush=True)
    print(render(json.loads(args.output.read_text())))


def _set_status(file: Path, part: str, status: str) -> None:
    content = json.loads(file.read_text())
    content["parts"][part]["status"] = status
    write(content, file)


if __name__ == "__main__":
    main()
