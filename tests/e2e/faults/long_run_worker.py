"""Trains over a live vLLM server for many updates, with partial rollouts and replay, and measures both."""

import json
import sys
from pathlib import Path

from bapo_trl import BAPOConfig, BAPOTrainer
from bapo_trl.tasks import load_task
from bapo_trl.upstream.fixes import end_training
from tests.helpers.long_run import Measurements
from tests.helpers.toy import CPU, OVER_SERVER


def main(out: str, settings: str) -> None:
    folder, settings = Path(out), json.loads(settings)
    model, server = settings.pop("model"), settings.pop("server")
    task = load_task()
    settings = {
        **CPU, **OVER_SERVER, "vllm_server_host": "127.0.0.1", "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 1, "steps_per_generation": 2, "num_generations": 4, "max_completion_length": 6,
        "replay_fraction": 0.5, "replay_capacity": 128, "partial_rollout_oversampling": 1.5,
        "partial_rollout_chunk_length": 2, "learning_rate": 1e-4, "lr_scheduler_type": "constant",
        "save_strategy": "steps", "save_steps": 100, "save_total_limit": 2, **settings,
    }  # fmt: skip
    args = BAPOConfig(str(folder / "run"), **settings)
    measurements = Measurements(folder / "measurements.jsonl", server)
    trainer = BAPOTrainer(model, task.reward_func, args, train_dataset=task.train_dataset, callbacks=[measurements])
    measurements.trainer = trainer
    trainer.train()
    end_training(trainer)


if __name__ == "__main__":
    main(*sys.argv[1:])
