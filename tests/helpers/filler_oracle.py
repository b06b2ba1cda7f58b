"""Gradients of updates with filler rows, beside those of their samples alone: `python -m tests.helpers.filler_oracle`.

As a program, it trains on several ranks and writes what each found: FOLDER and SETTINGS, as JSON.
"""

import json
import sys

import torch
from accelerate.utils import gather_object
from trl import GRPOTrainer

from bapo_trl import BAPOTrainer
from bapo_trl.losses import CLIPPED_LOSS_TYPES
from tests.helpers.ranks import finish
from tests.helpers.toy import digits_reward, ending_model, toy_run
from tests.test_equivalence import FIXED


MEAN_OF_ROWS = ("grpo", "sapo", "dr_grpo", "luspo")

# 24 rows a generation, in 3 updates of 2 micro-batches. The first batch of partial rollouts is half of it.
SHORT_FIRST_BATCH = {
    "partial_rollout_oversampling": 1.5, "partial_rollout_chunk_length": 2, "max_completion_length": 20,
    "num_generations": 2, "per_device_train_batch_size": 4, "steps_per_generation": 6, "num_iterations": 1,
    "max_steps": 4,
}  # fmt: skip
# 24 rows a pass, in 2 updates of 2 micro-batches: the second pass finds the groups whose rewards are not tied alone
FEW_QUEUED_ROWS = {"replay_zero_advantage": True, "num_iterations": 2, "max_steps": 4}


def often_tied(completions, **kwargs) -> list[float]:
    """Reward a digit at the start: groups often tie."""
    return [0.7 * text[:1].isdigit() + 0.2 * (text[:1] in "12") for text in completions]


class Gradients(BAPOTrainer):
    """Keeps each update's gradient, as the optimizer gets it, and that of its samples alone by TRL's own loss."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.micro_batches, self.found, self.expected, self.num_rows = [], [], [], []

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        self.micro_batches.append(inputs)
        return loss

    def _get_grad_norm(self, model, grad_norm=None):
        self.found.append(torch.cat([weight.grad.flatten() for weight in self.model.parameters()]))
        counts = [int(inputs["completion_mask"].any(1).sum()) for inputs in self.micro_batches]
        self.num_rows.append(sum(gather_object(counts)))
        self.expected.append(self._gradient_of_samples())
        self.micro_batches = []
        return super()._get_grad_norm(model, grad_norm=grad_norm)

    def _gradient_of_samples(self) -> torch.Tensor:
        samples = gather_object([samples_of(inputs) for inputs in self.micro_batches])
        filled = [part for part in samples if len(part["advantages"])]
        if not filled:
            return torch.zeros_like(self.found[-1])
        rows = [row_of(part, row) for part in filled for row in range(len(part["advantages"]))]
        if self.loss_type in MEAN_OF_ROWS:
            loss = sum(map(self._loss_of, rows)) / len(rows)
        elif self.loss_type == "bnpo":  # a mean over the tokens of each micro-batch
            loss = sum(map(self._loss_of, filled)) / len(filled)
        else:  # a sum, over the tokens of the generation by its micro-batches on all ranks
            loss = sum(map(self._loss_of, rows)) / len(samples)
        if self.args.entropy_coef:  # of a mean over the tokens of each micro-batch
            bonus = [self._loss_of(part, with_bonus=True) - self._loss_of(part) for part in filled]
            loss = loss + sum(bonus) / len(filled)
        return torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(self.model.parameters()))])

    def _loss_of(self, part, with_bonus: bool = False) -> torch.Tensor:
        """TRL's own loss of one micro-batch that is an update by itself."""
        steps, has_bonus = self.current_gradient_accumulation_steps, self._entropy_bonus_enabled
        self.current_gradient_accumulation_steps, self._entropy_bonus_enabled = 1, with_bonus
        loss = GRPOTrainer._compute_loss(self, self.model, part)
        self.current_gradient_accumulation_steps, self._entropy_bonus_enabled = steps, has_bonus
        return loss


def samples_of(inputs):
    """The rows of a micro-batch that have a token of the loss."""
    rows = inputs["completion_mask"].any(1)
    return {key: value[rows] if value.dim() and len(value) == len(rows) else value for key, value in inputs.items()}


def row_of(inputs, row):
    return {key: value[row : row + 1] if value.dim() else value for key, value in inputs.items()}


def gradients(folder, case: dict, model=None, **settings) -> Gradients:
    has_bounds = {**case, **settings}["loss_type"] in CLIPPED_LOSS_TYPES
    fixed = FIXED if has_bounds and settings.get("search_scope") != "batch" else {}
    settings = {**fixed, **case, "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, **settings}
    reward = often_tied if "replay_zero_advantage" in settings else digits_reward
    return toy_run(folder, model or ending_model(), Gradients, reward_funcs=reward, **settings)


def main(folder: str, settings: str) -> None:
    trainer = gradients(folder, json.loads(settings))
    found, expected = (torch.stack(each).tolist() for each in (trainer.found, trainer.expected))
    finish(trainer, folder, num_rows=trainer.num_rows, found=found, expected=expected)


if __name__ == "__main__":
    main(*sys.argv[1:])
