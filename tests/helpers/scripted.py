"""A trainer on scripted completions, so that every sharding sees the same rows."""

import torch

from bapo_trl import BAPOTrainer


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
