"""
One training run on the embedded task in a process of its own, and a pool that makes many of them.

    python benchmarks/training_run.py '{"seed": 0, "generations": 2, "args": {"learning_rate": 5e-4}}'

prints one line of JSON. Studies import [`run_all`], which keeps finished runs in a file and skips them the next time.
"""

import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from bapo_trl import BAPOConfig, BAPOTrainer
from bapo_trl.tasks import held_out_accuracy, load_task, warm_start_path
from measuring import ROOT


# A generation of 1,024 answers, 8 updates of 128 in one pass over it
SETTINGS = {
    "per_device_train_batch_size": 128,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 8,
    "num_generations": 8,
    "max_completion_length": 4,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
}
FIXED_CLIP = {  # of GRPO: nothing left to search
    "ratio_lower_start": 0.8,
    "ratio_lower_max": 0.8,
    "ratio_upper_start": 1.2,
    "ratio_upper_max": 1.2,
}


class HeldOut(TrainerCallback):
    """Measures held-out accuracy every so many updates, outside the clock of the run."""

    def __init__(self, every: int, test_dataset):
        self.every = every
        self.test_dataset = test_dataset
        self.points: list[dict] = []
        self.seconds = 0.0

    def on_step_end(self, args, state, control, model=None, processing_class=None, **kwargs):
        if state.global_step % self.every == 0:
            started = time.perf_counter()
            accuracy = held_out_accuracy(model, processing_class, self.test_dataset, num_samples=2)
            self.points.append({"update": state.global_step, **vars(accuracy)})
            self.seconds += time.perf_counter() - started


def run(spec: dict) -> dict:
    """
    Train once.

    Args:
        spec (`dict`):
            `seed`; `generations`, how many batches of answers to generate; `held_out_every`, generations between two
            measurements (default 2); `args`, settings of [`BAPOConfig`] on top of `SETTINGS`.

    Returns:
        `dict` with one value a generation for `reward` and `generated_tokens` (so far), held-out accuracy by
        generation, means of the update metrics, and the seconds of training.
    """
    torch.set_num_threads(1)
    task = load_task()
    settings = {**SETTINGS, **spec["args"]}
    with tempfile.TemporaryDirectory() as folder:
        args = BAPOConfig(folder, seed=spec["seed"], **settings)
        updates = args.updates_per_pass * args.num_iterations
        args.max_steps = spec["generations"] * updates
        held_out = HeldOut(spec.get("held_out_every", 2) * updates, task.test_dataset)
        trainer = BAPOTrainer(
            str(warm_start_path()), task.reward_func, args, train_dataset=task.train_dataset, callbacks=[held_out]
        )
        for callback in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(callback)
        started = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - started - held_out.seconds
    logs = [log for log in trainer.state.log_history if "loss" in log]
    generations = [log for log in logs if "reward" in log]
    rows = args.per_device_train_batch_size * args.steps_per_generation
    tokens, generated = 0, []
    for log in generations:
        tokens += round(log["completions/mean_length"] * rows)
        generated.append(tokens)
    means = {
        name: _mean([log[name] for log in logs if name in log])
        for name in (
            "frac_reward_zero_std",
            "staleness/mean",
            "staleness/max",
            "bapo/clip_low",
            "bapo/clip_high",
            "bapo/positive_share",
            "ratio/ess",
            "replay/reuse_mean",
        )
    }
    return {
        "updates": len(logs),
        "seconds": round(seconds, 1),
        "generated_tokens": generated,
        "reward": [round(log["reward"], 4) for log in generations],
        "entropy_first_last": [logs[0]["entropy"], logs[-1]["entropy"]],
        "held_out": [
            {
                "generations": point["update"] // updates,
                "greedy": round(point["greedy"], 4),
                "sampled": round(point["sampled"], 4),
            }
            for point in held_out.points
        ],
        "means": {name: value for name, value in means.items() if value is not None},
    }


def run_all(specs: Sequence[dict], finished: Path, jobs: int) -> list[dict]:
    """
    Make runs, each in a process of its own, `jobs` at a time with one thread each.

    Args:
        specs (sequence of `dict`):
            What [`run`] takes, and anything else that names the run.
        finished (`Path`):
            File of finished runs, a line of JSON each. Runs that it holds are not made again.
        jobs (`int`):
            Number of processes at a time.

    Returns:
        The specs in their order, each with its `result`.

    Raises:
        RuntimeError: If a run fails, with what it printed.
    """
    warm_start_path()
    finished.parent.mkdir(parents=True, exist_ok=True)
    results = {}
    if finished.exists():
        results = {line["key"]: line["result"] for line in map(json.loads, finished.read_text().splitlines())}
    missing = {_key(spec): spec for spec in specs if _key(spec) not in results}
    print(f"{len(specs) - len(missing)} of {len(specs)} runs are there.", flush=True)
    with ThreadPoolExecutor(jobs) as pool, open(finished, "a") as file:
        for key, result in zip(missing, pool.map(_run_in_process, missing.values()), strict=True):
            results[key] = result
            file.write(json.dumps({"key": key, "spec": missing[key], "result": result}) + "\n")
            file.flush()
            print(f"{len(results)}: {missing[key]} -> {result['held_out'][-1]}, {result['seconds']} s", flush=True)
    return [{**spec, "result": results[_key(spec)]} for spec in specs]


def _run_in_process(spec: dict) -> dict:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, __file__, json.dumps(spec)]
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(f"The run {spec} failed:\n{process.stdout}\n{process.stderr}")
    return json.loads(process.stdout.splitlines()[-1])


def _key(spec: dict) -> str:
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]


def _mean(values: Sequence[float]) -> float | None:
    defined = [value for value in values if not math.isnan(value)]
    return round(sum(defined) / len(defined), 4) if defined else None


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))
