"""
Time and memory of an update without padding and without samples that have no gradient, relative to `GRPOTrainer`.

    python -m benchmarks.layout_cost

`update_cost` runs this too. Both trainers train the same model, with TRL's defaults for gradient checkpointing and
loss, on the same completions: random tokens, whose lengths are all equal or lognormal with a mean of a quarter of the
limit. Trainers take turns in one process, update by update; each is created first in one of two runs. A ratio is of
CPU time, the geometric mean of the two runs' ratios. The update that scores the samples of a generation counts in the
ratio of the whole generation alone.

Memory is the highest resident memory of a process of each trainer's own, above its memory before the second
generation, with blocks that are given back when they are freed.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import TrainerCallback
from trl import GRPOTrainer

from benchmarks.common import ROOT, in_turns, keep_freed_memory, save_result, spread
from benchmarks.gpu_first_run.shapes import Shape, make_model
from benchmarks.gpu_first_run.trainers import Setup, make_trainer, settings_for
from benchmarks.watched_training import SteppedTraining


T = TypeVar("T")

SHAPE = Shape(256, 1024, 4, 4, 2, 1024, ties_embeddings=False)
ROWS, MICRO_BATCHES, UPDATES = 8, 4, 4  # samples of a micro-batch; micro-batches of an update; updates
GROUP = 4  # samples of a prompt
LIMIT = 512  # tokens of a completion
ON_CPU = Setup("cpu", "tiny", 0)
WARMUP_GENERATIONS = 1
ROUNDS = 3
RETURN_FREED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@dataclass(frozen=True)
class Workload:
    """A row of the results, with the limits of its ratios."""

    name: str
    is_lognormal: bool
    zero_advantage: float  # fraction of groups
    time_target: float
    memory_target: float


WORKLOADS = (
    Workload("equal lengths", False, 0.0, 1.02, 1.02),
    Workload("mean a quarter of the limit", True, 0.0, 0.40, 0.5),
    Workload("the same, 45 % of groups without advantage", True, 0.45, 0.22, 0.4),
)


class Completions:
    """A `rollout_func` of random tokens, and a reward that is the same for all completions of some groups."""

    def __init__(self, workload: Workload, seed: int, limit: int):
        self.workload, self.limit = workload, limit
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, list]:
        lengths = [self.limit] * len(prompts)
        if self.workload.is_lognormal:
            median = self.limit / 4 / math.exp(0.5)  # with a sigma of 1, the mean is exp(0.5) medians
            drawn = torch.empty(len(prompts)).log_normal_(math.log(median), 1.0, generator=self.generator)
            lengths = drawn.long().clamp(2, self.limit).tolist()
            lengths[0] = self.limit  # the longest of a generation reaches the limit
        end = trainer.model.config.eos_token_id
        tokens = [torch.randint(5, 40, (length - 1,), generator=self.generator).tolist() for length in lengths]
        prompt_ids = trainer.processing_class(prompts)["input_ids"]
        return {"prompt_ids": prompt_ids, "completion_ids": [[*row, end] for row in tokens], "logprobs": None}

    def reward(self, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        groups = len(completion_ids) // GROUP
        num_equal = round(self.workload.zero_advantage * groups)
        # Almost never the mean of their group, which would leave the sample without an advantage
        differing = [(7 * sum(ids) + row) % 1009 / 1009 for row, ids in enumerate(completion_ids)]
        return [0.5 if row // GROUP < num_equal else value for row, value in enumerate(differing)]


def make(
    kind: str,
    workload: Workload,
    folder: str,
    generations: int,
    model: Any,
    setup: Setup = ON_CPU,
    rows: int = ROWS,
    limit: int = LIMIT,
) -> GRPOTrainer:
    """Return a trainer, "grpo" or "bapo", that trains for some generations."""
    completions = Completions(workload, 0, limit)
    settings = settings_for(
        setup, rows, limit, steps_per_generation=MICRO_BATCHES * UPDATES, num_iterations=1,
        num_generations=GROUP, max_steps=generations * UPDATES, learning_rate=1e-6, optim="sgd",
    )  # fmt: skip
    scope = "grpo" if kind == "grpo" else "carried_over"
    return make_trainer(scope, model, folder, settings, rollout_func=completions, reward_funcs=completions.reward)


def measure_in_turns(
    trainers: Mapping[str, GRPOTrainer], generations: int, measure: Callable[[Callable[[], None]], T]
) -> dict[str, list[list[T]]]:
    """
    Train all trainers in turns, update by update, on the same samples, and return what `measure` returns of each.

    The result is by trainer, by generation without the first ones, and by update.
    """
    runs = {name: SteppedTraining(trainer) for name, trainer in trainers.items()}
    for run in runs.values():
        run.start()
    measured: dict[str, list[T]] = {name: [] for name in trainers}
    last = generations * UPDATES - 1
    for index, name in in_turns(trainers, last + 1):
        torch.manual_seed(index)  # by which TRL shuffles the samples of a generation: the same for all trainers
        measured[name].append(measure(runs[name].update if index < last else runs[name].finish))
    starts = range(WARMUP_GENERATIONS * UPDATES, generations * UPDATES, UPDATES)
    return {name: [each[start : start + UPDATES] for start in starts] for name, each in measured.items()}


def measure_time(workload: Workload, rounds: int) -> dict[str, Any]:
    """Return the ratios of an update and of a generation; `rounds` is the number of generations counted."""
    halves = [_seconds(workload, rounds, order) for order in (("grpo", "bapo"), ("bapo", "grpo"))]
    parts = {
        "update": slice(1, None),
        "generation": slice(None),
    }  # the first update scores
    ratios = {}
    for name, part in parts.items():
        of_halves = [
            [sum(bapo[part]) / sum(grpo[part]) for grpo, bapo in zip(half["grpo"], half["bapo"], strict=True)]
            for half in halves
        ]
        ratios[name] = spread([math.sqrt(first * second) for first, second in zip(*of_halves, strict=True)])
    seconds = [value for half in halves for generation in half["grpo"] for value in generation[1:]]
    return {
        **ratios,
        "grpo_update_s": round(statistics.median(seconds), 3),
        "computed": round(statistics.fmean(each for half in halves for each in half["computed"]), 3),
    }


def _seconds(workload: Workload, rounds: int, order: tuple[str, ...]) -> dict[str, list]:
    """Return the seconds of each update, by trainer and generation, and `padding/computed` of each update."""
    generations = WARMUP_GENERATIONS + rounds
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(SHAPE, "cpu", torch.float32, 0)
        trainers = {name: make(name, workload, f"{folder}/{name}", generations, model) for name in order}
        seconds = measure_in_turns(trainers, generations, cpu_s)
    return {**seconds, "computed": logged(trainers["bapo"], "padding/computed")}


def logged(trainer: GRPOTrainer, name: str) -> list[float]:
    """Return the values of a metric that a trainer logged at its updates."""
    return [log[name] for log in trainer.state.log_history if name in log]


def cpu_s(function: Callable[[], None]) -> float:
    """Return the CPU time of one call, in seconds, of all threads of the process."""
    start = time.process_time()
    function()
    return time.process_time() - start


class PeakMemory(TrainerCallback):
    """Callback that measures the highest resident memory of the process from its second generation on."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == UPDATES:
            self.idle = _resident_bytes("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far

    def on_train_end(self, args, state, control, **kwargs):
        self.above_idle = _resident_bytes("VmHWM") - self.idle


def _resident_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def measure_memory(workload: Workload) -> dict[str, Any]:
    """Return the peak of an update above the idle trainer, relative to that of `GRPOTrainer`."""
    peaks = {}
    for kind in ("grpo", "bapo"):
        command = [sys.executable, "-m", "benchmarks.layout_cost", "--peak_of", kind, "--workload", workload.name]
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **RETURN_FREED}, check=True, stdout=subprocess.PIPE, text=True
        )
        peaks[kind] = json.loads(done.stdout.splitlines()[-1])
    return {"memory": round(peaks["bapo"] / peaks["grpo"], 3), "grpo_peak_mib": round(peaks["grpo"] / 2**20)}


def measure_all(rounds: int) -> list[dict[str, Any]]:
    """Return the rows of the results."""
    rows = []
    for workload in WORKLOADS:
        rows.append({**asdict(workload), **measure_memory(workload), **measure_time(workload, rounds)})
        print(rows[-1], flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="generations of each workload")
    parser.add_argument("--peak_of", help=argparse.SUPPRESS)
    parser.add_argument("--workload", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.peak_of:
        (workload,) = (each for each in WORKLOADS if each.name == args.workload)
        with tempfile.TemporaryDirectory() as folder:
            model = make_model(SHAPE, "cpu", torch.float32, 0)
            trainer, peak = make(args.peak_of, workload, folder, 2, model), PeakMemory()
            trainer.add_callback(peak)
            trainer.train()
        print(peak.above_idle)
        return
    run(args.rounds)


def run(rounds: int = ROUNDS) -> None:
    """Measure all workloads, and write the result file."""
    keep_freed_memory()
    sizes = {"samples": ROWS, "micro_batches": MICRO_BATCHES, "updates": UPDATES, "limit": LIMIT}
    sizes = {"threads": 1, **asdict(SHAPE), **sizes}
    save_result("layout_cost", sizes, measure_all(rounds))


if __name__ == "__main__":
    main()
