"""Trains on scripted completions, so that every sharding sees the same rows, and writes the logs."""

import json
import sys

import torch

from bapo_trl import BAPOTrainer
from tests.helpers.ranks import finish
from tests.helpers.toy import toy_dataset, toy_model, toy_run


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
    trainer = toy_run(
        out,
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
    finish(trainer, out, micro_batches=trainer.num_micro_batches)


if __name__ == "__main__":
    main(*sys.argv[1:])
