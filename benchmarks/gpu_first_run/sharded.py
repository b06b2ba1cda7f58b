"""Check that a sharded training on all GPUs resumes exactly, and measure the time of its saves."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

from bapo_trl.script.launcher import CONFIGS
from benchmarks.common import ROOT
from benchmarks.gpu_first_run.trainers import Case, Setup, first_gpu, sums_task
from benchmarks.warm_start import warm_start_path


LAUNCH_FILES = {"one process": None, "FSDP2": "fsdp2", "DeepSpeed ZeRO-3": "zero3"}
UPDATES, RESUMED_AT, SAVED_EVERY = 16, 8, 4
FLAGS = {
    "config": "recipes/quickstart.yaml", "max_steps": UPDATES, "save_steps": SAVED_EVERY, "save_total_limit": 4,
    "do_eval": False, "logging_steps": 1, "replay_capacity": 2048, "replay_fraction": 0.5, "replay_max_staleness": 16,
}  # fmt: skip


def sharded(setup: Setup) -> dict[str, Case]:
    return {name: Case(partial(_resume, setup, name), _find_lack(setup, name)) for name in LAUNCH_FILES}


def _resume(setup: Setup, name: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        straight, resumed = Path(folder, "straight"), Path(folder, "resumed")
        seconds = _train(setup, name, straight)
        seconds_resumed = _train(setup, name, resumed, straight / f"checkpoint-{RESUMED_AT}")
        start = warm_start_path(setup.seed, sums_task(setup))
        weights, others, before = (load_file(run / "model.safetensors") for run in (straight, resumed, start))
        return {
            "processes": 1 if LAUNCH_FILES[name] is None else max(1, torch.cuda.device_count()),
            "updates": len(seconds),
            "updates_resumed": len(seconds_resumed),
            "largest_difference": _largest_difference(weights, others),
            "largest_change_of_a_weight": _largest_difference(weights, before),
            "seconds_of_updates": seconds,
            "saved_after_updates": list(range(SAVED_EVERY, UPDATES + 1, SAVED_EVERY)),
        }


def _largest_difference(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    return max((weights[key].float() - others[key].float()).abs().max().item() for key in weights)


def _find_lack(setup: Setup, name: str) -> str | None:
    if LAUNCH_FILES[name] is not None and not setup.on_gpu:
        return setup.lacks_gpu
    if "DeepSpeed" in name and setup.deepspeed is None and importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed; `--deepspeed FOLDER` says where it is"
    return None


def _train(setup: Setup, name: str, folder: Path, checkpoint: Path | None = None) -> list[float]:
    """Train, or resume from a given checkpoint, and return the seconds of each update."""
    launch_file, clock = LAUNCH_FILES[name], folder.with_suffix(".json")
    command = [sys.executable]
    if launch_file is not None:
        command += ["-m", "accelerate.commands.launch", "--config_file", str(CONFIGS[launch_file])]
        command += ["--num_processes", str(max(1, torch.cuda.device_count()))]
    command += ["-m", "benchmarks.gpu_first_run.clocked_training", str(clock)]
    flags = {**FLAGS, **setup.sizes.sharded_flags, "output_dir": folder, "use_cpu": not setup.on_gpu}
    flags["model_name_or_path"] = warm_start_path(setup.seed, sums_task(setup))
    flags |= {"bf16": setup.on_gpu, **({} if checkpoint is None else {"resume_from_checkpoint": checkpoint})}
    command += [str(word) for key, value in flags.items() for word in (f"--{key}", value)]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    if "DeepSpeed" in name and setup.deepspeed is not None:
        paths.append(str(setup.deepspeed.resolve()))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **({} if launch_file else first_gpu())}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
    return json.loads(clock.read_text())
