"""A long run holds what a short one holds, and takes no longer for an update: what grows would end it some day."""

import json
import time
from itertools import combinations
from pathlib import Path
from statistics import median

import psutil
import pytest
from transformers import TrainerCallback

from bapo_trl.replay.mixer import ReplayMixer
from bapo_trl.rollouts.partial import PartialRollouts
from bapo_trl.upstream.fixes import end_training
from tests.helpers.commands import succeeded
from tests.helpers.fault_counts import CPU_LIMIT, cases
from tests.helpers.forked import run_function
from tests.helpers.toy import ending_model, part_of, toy_trainer
from tests.rollouts.test_rollout_rounds import PARTIAL


SETTINGS = {
    **PARTIAL, "replay_fraction": 0.5, "replay_capacity": 200, "learning_rate": 1e-4, "logging_steps": 10,
    "save_strategy": "steps", "save_steps": 100, "save_total_limit": 2,
}  # fmt: skip


class Measurements(TrainerCallback):
    """Writes a line after each update: what this process holds."""

    def __init__(self, path: Path):
        self.trainer, self.path = None, path
        self.process = psutil.Process()
        self.seconds = time.process_time()

    def on_step_end(self, args, state, control, **kwargs):
        trainer = self.trainer
        seconds = time.process_time()
        line = {
            "update": state.global_step,
            "CPU seconds": seconds - self.seconds,
            "memory": self.process.memory_info().rss,
            "open files": self.process.num_fds(),
            "threads": self.process.num_threads(),
            "hooks": sum(
                len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
                for module in trainer.model.modules()
            ),
        }
        line["rows in the queue"] = len(part_of(trainer, ReplayMixer).buffer)
        line["groups in the pool"] = sum(1 for _ in part_of(trainer, PartialRollouts).pool)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.seconds = time.process_time()


def assert_nothing_grows(path: Path, updates: int, warm_up: int, num_bins: int = 20) -> None:
    """See that no measurement grows after the first updates; memory by less than 5 % of its median."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["update"] for line in lines] == list(range(1, updates + 1))
    for name in lines[0].keys() - {"update"}:
        values = [line[name] for line in lines[warm_up:]]
        if name == "CPU seconds" or name.startswith("memory"):
            limit = CPU_LIMIT if name == "CPU seconds" else 0.05
            assert growth(values, num_bins) < limit * median(values), name
        else:
            assert abs(growth(values, num_bins)) < 0.05 * max(1, median(values)), name


def growth(values: list[float], num_bins: int) -> float:
    """
    Return by how much values grow from their first to their last: the median slope between any two of the medians of
    `num_bins` stretches (Theil-Sen), times the length. A few outliers do not move it.
    """
    size = len(values) // num_bins
    medians = [median(values[start : start + size]) for start in range(0, num_bins * size, size)]
    slopes = [(b - a) / (j - i) for (i, a), (j, b) in combinations(enumerate(medians), 2)]
    return median(slopes) * num_bins


def train_long(folder: str, updates: str) -> None:
    """Train for many updates, and measure each."""
    measurements = Measurements(Path(folder) / "measurements.jsonl")
    parts = {"callbacks": [measurements]}
    trainer = toy_trainer(
        f"{folder}/run", ending_model(), trainer_args=parts, **{**SETTINGS, "max_steps": int(updates)}
    )
    measurements.trainer = trainer
    trainer.train()
    end_training(trainer)


@pytest.mark.processes
@pytest.mark.trainings
def test_a_long_run_does_not_grow(tmp_path):
    updates = cases(3000)
    succeeded(run_function(train_long, tmp_path, updates, timeout_s=1800))
    assert_nothing_grows(tmp_path / "measurements.jsonl", updates, updates // 5)
