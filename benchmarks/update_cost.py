"""
Measure time and memory of optimizer updates of `BAPOTrainer` relative to `GRPOTrainer`, on the same samples.

    python -m benchmarks.update_cost

Both trainers run `train()` in the same process and take turns, update by update, in reverse order every other time.
They generate in the same way, so that generation is left out: completions are random tokens. The time of an update
varies by a few percent with the location of its tensors in memory, and some of the differences are smaller. Therefore
both trainers train the same randomly initialised Qwen2, freed memory stays with the process (`keep_freed_memory`), and
each is created first in one of two runs; a ratio is of CPU time, the geometric mean of the two runs' ratios.

- `results/update_cost.json` has the cost of the search, by its scope: updates on one batch of stale samples, with
  TRL's micro-batches. Its row `control` compares `GRPOTrainer` with itself: its difference from 1 is noise.
- `results/layout_cost.json` has micro-batches without padding and without samples that have no gradient, for
  completions of equal and of lognormal lengths. The update that scores the samples of a generation counts in the ratio
  of the whole generation alone. Memory is the highest resident memory of a process of each trainer's own, above its
  memory before the second generation, with blocks that are given back when they are freed.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from trl import GRPOTrainer

from benchmarks.common import ROOT, cpu_s, keep_freed_memory, save_result, spread
from benchmarks.gpu_first_run.shapes import Shape, make_model
from benchmarks.gpu_first_run.trainers import Setup, make_trainer, settings_for
from benchmarks.watched_training import SteppedTraining, train_in_turns


SHAPE = Shape(256, 1024, 4, 4, 2, 1024, ties_embeddings=False)
GROUP = 4  # samples of a prompt
ON_CPU = Setup("cpu", "tiny", 0)
ORDERS = (("grpo", "bapo"), ("bapo", "grpo"))


@dataclass(frozen=True)
class Workload:
    """Lengths and rewards of the completions, with the limits of the ratios."""

    name: str
    lengths: str  # "equal", "uniform" from half of the limit, or "lognormal" with a mean of a quarter of it
    zero_advantage: float = 0.0  # fraction of groups
    time_target: float | None = None
    memory_target: float | None = None


class Completions:
    """A `rollout_func` of random tokens, and a reward that is the same for all completions of some groups."""

    def __init__(self, workload: Workload, limit: int):
        self.workload, self.limit = workload, limit
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, list]:
        lengths = torch.full((len(prompts),), self.limit)
        if self.workload.lengths == "uniform":
            lengths = torch.randint(self.limit // 2, self.limit + 1, lengths.shape, generator=self.generator)
        elif self.workload.lengths == "lognormal":
            median = self.limit / 4 / math.exp(0.5)  # with a sigma of 1, the mean is exp(0.5) medians
            drawn = torch.empty(len(prompts)).log_normal_(math.log(median), 1.0, generator=self.generator)
            lengths = drawn.long().clamp(2, self.limit)
        lengths[0] = self.limit  # the longest of a generation reaches the limit
        end = trainer.model.config.eos_token_id
        tokens = [
            torch.randint(5, 40, (length - 1,), generator=self.generator).tolist() for length in lengths.tolist()
        ]
        prompt_ids = trainer.processing_class(prompts)["input_ids"]
        return {"prompt_ids": prompt_ids, "completion_ids": [[*row, end] for row in tokens], "logprobs": None}

    def reward(self, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        groups = len(completion_ids) // GROUP
        num_equal = round(self.workload.zero_advantage * groups)
        # Almost never the mean of their group, which would leave the sample without an advantage
        differing = [(7 * sum(ids) + row) % 1009 / 1009 for row, ids in enumerate(completion_ids)]
        return [0.5 if row // GROUP < num_equal else value for row, value in enumerate(differing)]


def make(
    kind: str, workload: Workload, folder: str, model: Any, setup: Setup, rows: int, limit: int, **settings: Any
) -> GRPOTrainer:
    """Return a trainer, "grpo" or of a search scope, on a workload of micro-batches of `rows` samples."""
    completions = Completions(workload, limit)
    given = settings_for(setup, rows, limit, **{"num_generations": GROUP, "learning_rate": 1e-6, **settings})
    return make_trainer(kind, model, folder, given, rollout_func=completions, reward_funcs=completions.reward)


def measure_orders(
    make_one: Callable[[str, Any, str], GRPOTrainer], updates: int, measure: Callable[[SteppedTraining, Callable], Any]
) -> Iterator[tuple[dict[str, list], dict[str, GRPOTrainer]]]:
    """Train both trainers in turns, in one run for each of `ORDERS`; yield what was measured, and the trainers."""
    for order in ORDERS:
        with tempfile.TemporaryDirectory() as folder:
            model = make_model(SHAPE, "cpu", torch.float32, 0)
            trainers = {name: make_one(name, model, f"{folder}/{name}") for name in order}
            yield train_in_turns(trainers, updates, measure), trainers


def ratios_of(halves: list[dict[str, list[float]]]) -> dict[str, float | int]:
    """Return the spread of BAPO's seconds over GRPO's: the geometric mean over both runs of each place's ratio."""
    ratios = [[bapo / grpo for grpo, bapo in zip(half["grpo"], half["bapo"], strict=True)] for half in halves]
    return spread([math.sqrt(first * second) for first, second in zip(*ratios, strict=True)])


# The search


SCOPE_ROWS, SCOPE_TOKENS, WARMUP_ROUNDS = 4, 224, 3


@dataclass(frozen=True)
class Setting:
    """A row of the results; `scope` is "grpo" for the control, with `GRPOTrainer` instead of `BAPOTrainer`."""

    name: str
    scope: str
    micro_batches: int
    gradient_checkpointing: bool
    target: float | None


SETTINGS = (
    Setting("control", "grpo", 4, False, None),
    Setting("micro_batch", "micro_batch", 4, False, 1.02),
    Setting("carried_over", "carried_over", 4, False, 1.02),
    Setting("batch", "batch", 4, False, 1.40),
    Setting("batch_checkpointing", "batch", 4, True, 1.30),
    Setting("batch_of_one", "batch", 1, False, 1.02),
)


def measure_scope(setting: Setting, rounds: int) -> dict:
    """Return a row of the results."""
    updates = WARMUP_ROUNDS + rounds + 1
    settings = {
        "num_iterations": updates, "max_steps": updates, "gradient_accumulation_steps": setting.micro_batches,
        "steps_per_generation": setting.micro_batches, "gradient_checkpointing": setting.gradient_checkpointing,
    }  # fmt: skip
    with_weight = {"negative_weight_min": 0.05} if setting.scope == "carried_over" else {}  # all that it is for

    def make_one(name: str, model: Any, folder: str) -> GRPOTrainer:
        own = {} if "grpo" in (name, setting.scope) else {**with_weight, "micro_batch_layout": "padded"}
        kind = "grpo" if name == "grpo" else setting.scope
        workload = Workload(setting.name, "uniform")
        return make(kind, workload, folder, model, ON_CPU, SCOPE_ROWS, SCOPE_TOKENS, **settings, **own)

    halves = []
    for measured, _ in measure_orders(make_one, updates, _seconds_and_forwards):
        counted = {name: own[WARMUP_ROUNDS:-1] for name, own in measured.items()}  # the last ends the training, too
        halves.append({name: [seconds for seconds, _ in own] for name, own in counted.items()})
        for name, own in counted.items():
            _check_forwards(name, [forwards for _, forwards in own], setting)
    seconds = [value for half in halves for value in half["grpo"]]
    return {**asdict(setting), "ratio": ratios_of(halves), "grpo_update_s": round(statistics.median(seconds), 3)}


def _seconds_and_forwards(run: SteppedTraining, update: Callable[[], None]) -> tuple[float, int]:
    before = run.forwards
    return cpu_s(update), run.forwards - before


def _check_forwards(name: str, forwards: list[int], setting: Setting) -> None:
    # The figure would be void if the samples were fresh and the search could do without its forward passes.
    looks_ahead = name == "bapo" and setting.scope == "batch" and setting.micro_batches > 1
    expected = setting.micro_batches * (2 if looks_ahead else 1)
    if {*forwards} != {expected}:
        raise RuntimeError(f"{setting.name}: {forwards} forward passes in updates of {name}, expected {expected}.")


# Micro-batches without padding


ROWS, LIMIT, MICRO_BATCHES, UPDATES = 8, 512, 4, 4  # of a micro-batch; of an update; of a generation
WARMUP_GENERATIONS = 1
WORKLOADS = (
    Workload("equal lengths", "equal", 0.0, 1.02, 1.02),
    Workload("mean a quarter of the limit", "lognormal", 0.0, 0.40, 0.5),
    Workload("the same, 45 % of groups without advantage", "lognormal", 0.45, 0.22, 0.4),
)
RETURN_FREED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def make_for_layout(
    name: str, workload: Workload, folder: str, model: Any, generations: int, setup: Setup, rows: int, limit: int
) -> GRPOTrainer:
    """Return a trainer, "grpo" or "bapo", that trains for some generations."""
    return make(
        "grpo" if name == "grpo" else "carried_over", workload, folder, model, setup, rows, limit,
        steps_per_generation=MICRO_BATCHES * UPDATES, num_iterations=1, max_steps=generations * UPDATES, optim="sgd",
    )  # fmt: skip


def by_generation(measured: Mapping[str, list]) -> dict[str, list[list]]:
    """Return what was measured of each update, by generation, without the first one."""
    starts = range(WARMUP_GENERATIONS * UPDATES, len(next(iter(measured.values()))), UPDATES)
    return {name: [each[start : start + UPDATES] for start in starts] for name, each in measured.items()}


def logged(trainer: GRPOTrainer, name: str) -> list[float]:
    """Return the values of a metric that a trainer logged at its updates."""
    return [log[name] for log in trainer.state.log_history if name in log]


def measure_layout(workload: Workload, rounds: int) -> dict[str, Any]:
    """Return the ratios of an update and of a generation; `rounds` is the number of generations counted."""
    generations = WARMUP_GENERATIONS + rounds

    def make_one(name: str, model: Any, folder: str) -> GRPOTrainer:
        return make_for_layout(name, workload, folder, model, generations, ON_CPU, ROWS, LIMIT)

    halves, computed = [], []
    for measured, trainers in measure_orders(make_one, generations * UPDATES, lambda run, update: cpu_s(update)):
        halves.append(by_generation(measured))
        computed += logged(trainers["bapo"], "padding/computed")
    parts = {"update": slice(1, None), "generation": slice(None)}  # the first update scores
    seconds = [value for half in halves for generation in half["grpo"] for value in generation[1:]]
    return {
        **{
            name: ratios_of(
                [{kind: [sum(each[part]) for each in own] for kind, own in half.items()} for half in halves]
            )
            for name, part in parts.items()
        },
        "grpo_update_s": round(statistics.median(seconds), 3),
        "computed": round(statistics.fmean(computed), 3),
    }


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


def print_peak(name: str, workload: Workload) -> None:
    """Print the peak of an update of a trainer above the idle trainer, in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(SHAPE, "cpu", torch.float32, 0)
        trainer, peak = make_for_layout(name, workload, folder, model, 2, ON_CPU, ROWS, LIMIT), PeakMemory()
        trainer.add_callback(peak)
        trainer.train()
    print(peak.above_idle)


def measure_memory(workload: Workload) -> dict[str, Any]:
    """Return the peak of an update above the idle trainer, relative to that of `GRPOTrainer`."""
    peaks = {}
    for name in ("grpo", "bapo"):
        command = [sys.executable, "-m", "benchmarks.update_cost", "--peak_of", name, "--workload", workload.name]
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **RETURN_FREED}, check=True, stdout=subprocess.PIPE, text=True
        )
        peaks[name] = json.loads(done.stdout.splitlines()[-1])
    return {"memory": round(peaks["bapo"] / peaks["grpo"], 3), "grpo_peak_mib": round(peaks["grpo"] / 2**20)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="rounds of each scope")
    parser.add_argument("--generations", type=int, default=3, help="generations of each workload")
    parser.add_argument("--peak_of", help=argparse.SUPPRESS)
    parser.add_argument("--workload", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.peak_of:
        return print_peak(args.peak_of, next(each for each in WORKLOADS if each.name == args.workload))
    keep_freed_memory()
    sizes = {"threads": 1, **asdict(SHAPE)}
    results = []
    for setting in SETTINGS:
        results.append(measure_scope(setting, args.rounds))
        print(results[-1], flush=True)
    save_result("update_cost", {**sizes, "rows": SCOPE_ROWS, "completion_tokens": SCOPE_TOKENS}, results)
    results = []
    for workload in WORKLOADS:
        time_and_memory = {**measure_memory(workload), **measure_layout(workload, args.generations)}
        results.append({**asdict(workload), **time_and_memory})
        print(results[-1], flush=True)
    sizes |= {"samples": ROWS, "micro_batches": MICRO_BATCHES, "updates": UPDATES, "limit": LIMIT}
    save_result("layout_cost", sizes, results)


if __name__ == "__main__":
    main()
