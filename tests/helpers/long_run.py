"""A run of many updates that measures itself: what grows would end it some day."""

import json
import sys
import time
from pathlib import Path

import psutil
from transformers import TrainerCallback

from bapo_trl.upstream.fixes import end_training
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
        if trainer._replay is not None:
            line["rows in the queue"] = len(trainer._replay.queue)
        if trainer._rounds is not None:
            line["groups in the pool"] = sum(1 for _ in trainer._rounds.pool)
        if self.server is not None:
            tree = [self.server, *self.server.children(recursive=True)]
            line["memory of the server"] = sum(process.memory_info().rss for process in tree)
            line["open files of the server"] = sum(process.num_fds() for process in tree)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.seconds = time.process_time()


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
