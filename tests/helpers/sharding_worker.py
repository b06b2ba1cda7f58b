"""Trains on scripted completions, so that every sharding sees the same rows, and writes the logged bounds."""

import json
import sys

import torch

from bapo_trl import BAPOTrainer
from bapo_trl.clip_bounds import update_log as diagnostics
from bapo_trl.upstream.fixes import end_training
from tests.helpers.toy import toy_dataset, toy_model, toy_trainer, training_logs


class Scripted(BAPOTrainer):
    """Completions follow from the prompt and the number of times it was seen; log-probs are the model's own."""

    num_micro_batches = 0

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        completions = []
        for row, prompt in enumerate(prompt_ids):
            place = self.accelerator.process_index * len(prompt_ids) + row
            generator = torch.Generator().manual_seed(sum(prompt) * 31 + place % self.num_generations)
            length = int(torch.randint(2, 8, (), generator=generator))
            completions.append((2 + torch.randint(0, 60, (length,), generator=generator)).tolist())
        return completions, None

    def _compute_loss(self, model, inputs):
        self.num_micro_batches += 1
        return super()._compute_loss(model, inputs)


def main(out: str, micro_batches: str, rows: str, settings: str) -> None:
    trainer = toy_trainer(
        out + ".d",
        model=toy_model(),
        trainer_class=Scripted,
        **json.loads(settings),
        optim="sgd",  # Adam would turn the rounding of a tiny gradient into a full step
        learning_rate=2.0,
        max_grad_norm=0.0,
        gradient_accumulation_steps=int(micro_batches),
        steps_per_generation=int(micro_batches),
        per_device_train_batch_size=int(rows),
        num_generations=4,
        num_iterations=3,
        max_steps=3,
        trainer_args={"train_dataset": toy_dataset(8)},
    )
    trainer.train()
    if trainer.accelerator.is_main_process:
        logs = [
            {name: log[name] for name in diagnostics.UPDATE_METRICS if name in log} for log in training_logs(trainer)
        ]
        result = {
            "num_processes": trainer.accelerator.num_processes,
            "micro_batches": trainer.num_micro_batches,
            "logs": logs,
        }
        with open(out, "w") as file:
            json.dump(result, file)
    end_training(trainer)


if __name__ == "__main__":
    main(*sys.argv[1:])
