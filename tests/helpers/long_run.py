"""A run of many updates that measures itself: what grows would end it some day."""

import json
import sys
import time
from itertools import combinations
from pathlib import Path
from statistics import median

import psutil
from transformers import TrainerCallback

from bapo_trl.replay.mixer import ReplayMixer
from bapo_trl.rollouts.partial import PartialRollouts
from bapo_trl.upstream.fixes import end_training
from tests.helpers.fault_counts import CPU_LIMIT
from tests.helpers.toy import ending_model, toy_trainer
from tests.rollouts.test_rollout_rounds import PARTIAL


SETTINGS = {
    **PARTIAL, "replay_fraction": 0.5, "replay_capacity": 200, "learning_rate": 1e-4, "logging_steps": 10,
    "save_strategy": "steps", "save_steps": 100, "save_total_limit": 2,
}  # fmt: skip


class Measurements(TrainerCallback):
    """Writes a line after each update: what this process and the processes of a server hold."""

    def __init__(self, path: Path, server: int | None = None):
        self.trainer, self.path = None, path
        self.process = psutil.Process()
        self.server = psutil.Process(server) if server is not None else None
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
        kinds = {type(part): part for part in trainer.parts}
        if ReplayMixer in kinds:
            line["rows in the queue"] = len(kinds[ReplayMixer].buffer)
        if PartialRollouts in kinds:
            line["groups in the pool"] = sum(1 for _ in kinds[PartialRollouts].rounds.pool)
        if self.server is not None:
            tree = [self.server, *self.server.children(recursive=True)]
            line["memory of the server"] = sum(process.memory_info().rss for process in tree)
            line["open files of the server"] = sum(process.num_fds() for process in tree)
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


def main(folder: str, updates: str) -> None:
    measurements = Measurements(Path(folder) / "measurements.jsonl")
    trainer = toy_trainer(
        Path(folder) / "run",
        model=ending_model(),
        trainer_args={"callbacks": [measurements]},
        **{**SETTINGS, "max_steps": int(updates)},
    )
    measurements.trainer = trainer
    trainer.train()
    end_training(trainer)


if __name__ == "__main__":
    main(*sys.argv[1:])
