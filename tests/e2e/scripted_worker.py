"""Trains with the replay queue on scripted completions, so that every engine and sharding sees the same rows."""

import sys
from pathlib import Path

from peft import LoraConfig

from tests.helpers.ranks import finish
from tests.helpers.save_events import SaveEvents
from tests.helpers.scripted import Scripted
from tests.helpers.toy import toy_dataset, toy_model, toy_trainer


def main(out: str, micro_batches: str, kind: str, checkpoint: str = "", *kill: str) -> None:
    """Train all weights ("full"), also in TRL's micro-batches ("padded"), or an adapter ("lora")."""
    # A pass is one update on a whole generation, drawn from the queue: the same rows however they are sharded.
    folder = Path(out)
    lora = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    # SGD: Adam would turn the rounding of a tiny gradient into a full step
    settings = {"learning_rate": 2.0, "search_scope": "carried_over"}
    if kind == "lora":
        settings = {"learning_rate": 0.2, "search_scope": "batch"}
    if kind == "padded":
        settings["micro_batch_layout"] = "padded"
    trainer = toy_trainer(
        folder, model=toy_model(), trainer_class=Scripted, optim="sgd", max_grad_norm=0.0,
        gradient_accumulation_steps=int(micro_batches), steps_per_generation=int(micro_batches),
        per_device_train_batch_size=2, num_generations=4, num_iterations=2, replay_fraction=1.0, max_steps=6,
        save_strategy="steps", save_steps=4,
        trainer_args={"train_dataset": toy_dataset(8), "peft_config": lora if kind == "lora" else None},
        **settings,
    )  # fmt: skip
    if kill:
        rank, event, tears = kill
        if trainer.accelerator.process_index == int(rank):
            SaveEvents(6, event, tears == "tears").watch(trainer)
    trainer.train(resume_from_checkpoint=checkpoint == "true" or checkpoint or None)
    trainer.save_model(str(folder / "final"))
    finish(trainer, folder, optimizer=type(trainer.optimizer).__name__)


if __name__ == "__main__":
    main(*sys.argv[1:])
