"""Trains the embedded task over a live vLLM server, and hands the server the last weights."""

import json
import sys
from pathlib import Path

from peft import LoraConfig
from transformers import BitsAndBytesConfig

from bapo_trl import BAPOConfig, BAPOTrainer
from bapo_trl.tasks import load_task
from tests.e2e.launching import LEARNS
from tests.helpers.ranks import finish
from tests.helpers.toy import CPU, OVER_SERVER, digits_reward


class Deaf(BAPOTrainer):
    """The server never hears of new weights after the first ones, and nothing says so."""

    def _generate_single_turn(self, *args, **kwargs):
        if self.state.global_step > 0:
            self._last_loaded_step = self.state.global_step
        return super()._generate_single_turn(*args, **kwargs)


def main(out: str, settings: str) -> None:
    folder, settings = Path(out), json.loads(settings)
    task = load_task()
    lora = LoraConfig(r=8, lora_alpha=32, target_modules="all-linear") if settings.pop("uses_lora", False) else None
    trainer_class = Deaf if settings.pop("is_deaf", False) else BAPOTrainer
    model = settings.pop("model")
    reward = digits_reward if settings.pop("rewards_digits", False) else task.reward_func
    quantization = settings.pop("quantization", None)
    args = BAPOConfig(str(folder), **{**CPU, **OVER_SERVER, "vllm_server_host": "127.0.0.1", **LEARNS, **settings})
    trainer = trainer_class(
        model, reward, args, train_dataset=task.train_dataset, peft_config=lora,
        quantization_config=quantization and BitsAndBytesConfig(**quantization),
    )  # fmt: skip
    try:
        trainer.train()
    except RuntimeError as error:
        (folder / f"rank-{trainer.accelerator.process_index}.error").write_text(str(error))
        raise
    trainer.vllm_generation.sync_weights()
    trainer.save_model(str(folder / "final"))
    finish(trainer, folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
