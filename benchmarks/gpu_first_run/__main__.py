"""
Runs on a GPU whose answer is still open: one command, no download.

    python -m benchmarks.gpu_first_run --output first_run.json
    python -m benchmarks.gpu_first_run --output first_run.json --continue first_run.json
    python -m benchmarks.gpu_first_run --table first_run.json

Needs torch, transformers, trl, datasets, peft and accelerate. The whole takes `--minutes` at most: a case is started
only if the longest one of its part so far took less than what is left, and is cut at the limit. The file is written
after each case, so that it is complete wherever the command is cut. Cases that need a GPU, vLLM, DeepSpeed or a chat
model are skipped where there is none. `--device cpu --sizes tiny` tries the command itself.

Parts, in this order:

    time      seconds, without evaluations, until SmolLM2-135M with LoRA (`--chat_model FOLDER`) reaches an accuracy on
              `chain_sum`, sampled by vLLM: GRPOTrainer with TRL's defaults, and the recommendation; three seeds, in
              eight minutes; checks that the reward rises, and that each phase takes time
    layout    wall time and peak memory above idle of an update without padding and skipped samples, random weights of
              Qwen2.5-0.5B's shape, relative to GRPOTrainer, in at most 100 s on an H100: at most 1.02 times (equal
              lengths), 0.40 and 0.5 times (lognormal), 0.22 and 0.4 times (45 % of groups without advantage); the same
              norms of gradients
    sharded   FSDP2 and DeepSpeed ZeRO-3, on all GPUs of the machine: 16 updates, resumed at update 8, with the same
              weights; the time of a save
    qlora     SmolLM2-135M with LoRA (`--chat_model FOLDER`), its base in 4 bits and in bfloat16: rewards by vLLM
              and by transformers
"""

import argparse
import importlib.metadata
import json
import platform
import signal
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import command_line
from benchmarks.gpu_first_run.plan import PARTS, make_plan, run_plan, write
from benchmarks.gpu_first_run.shapes import SIZES
from benchmarks.gpu_first_run.table import render
from benchmarks.gpu_first_run.trainers import Setup


SEED = 0
PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft", "datasets", "numpy")
MINUTES = 10.0


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="file to write")
    parser.add_argument("--continue", dest="old", type=Path, metavar="OLD", help="file of a call that was cut")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the tables of a file")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--sizes", choices=sorted(SIZES), default="full")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART",
                        help=f"of {', '.join(PARTS)}; all by default")  # fmt: skip
    parser.add_argument("--minutes", type=float, default=MINUTES, help="limit on the whole; default: %(default)s")
    parser.add_argument(
        "--chat_model", type=Path, metavar="FOLDER", help="SmolLM2-135M-Instruct, for the parts `time` and `qlora`"
    )
    parser.add_argument("--deepspeed", type=Path, metavar="FOLDER", help="where DeepSpeed is, for the part `sharded`")
    return parser


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    if args.table is not None:
        print(render(json.loads(args.table.read_text())))
        return
    if args.output is None:
        parser.error("give --output, or --table")

    ran_for_s = time.time() - psutil.Process().create_time()  # with the imports
    deadline = time.monotonic() - ran_for_s + 60 * args.minutes
    setup = Setup(args.device, args.sizes, SEED, args.chat_model, args.deepspeed)
    content = read_earlier(args, parser)
    content["date"], content["machine"] = date.today().isoformat(), describe_machine(args.device)
    content["command"] = command_line("benchmarks.gpu_first_run")
    plan = make_plan(args.parts, setup)
    for name in args.parts:
        rows = content["parts"].setdefault(name, {"cases": {}})["cases"]
        rows |= {case: {"skipped": it.lacks} for case, it in PARTS[name](setup).items() if it.lacks}
    write(with_statuses(content, setup), args.output)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no process is left on the device
    try:
        run_plan(plan, setup, args.output, deadline)
    finally:
        content = with_statuses(json.loads(args.output.read_text()), setup)
        write(content, args.output)
    print(render(content))


def read_earlier(args: argparse.Namespace, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return what an earlier call has left, without what failed or was skipped, which is tried again."""
    asked = {"device": args.device, "sizes": args.sizes, "seed": SEED}
    if args.old is None:
        return {"asked": asked, "parts": {}}
    content = json.loads(args.old.read_text())
    if content["asked"] != asked:
        parser.error(f"{args.old} was made with {content['asked']}, not with {asked}")
    if unknown := ", ".join(content["parts"].keys() - PARTS.keys()):
        parser.error(f"{args.old} has parts of an earlier version: {unknown}. Start a new file.")
    for part in content["parts"].values():
        part["cases"] = {case: row for case, row in part["cases"].items() if not {"error", "skipped"} & row.keys()}
    return content


def with_statuses(content: dict[str, Any], setup: Setup) -> dict[str, Any]:
    """Say of each part whether it is done, or which cases were not reached."""
    for name, part in content["parts"].items():
        missing = [case for case in PARTS[name](setup) if case not in part["cases"]]
        status = f"not reached: {', '.join(missing)}" if missing else "done"
        content["parts"][name] = {"status": status, "cases": part["cases"]}
    return content


if __name__ == "__main__":
    main()
