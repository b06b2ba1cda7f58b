"""Copies that keep the size of a batch train as if they were not there: an update has the gradient of its samples."""

import json

import pytest
import torch
from accelerate.utils import gather_object
from trl import GRPOTrainer

from bapo_trl import BAPOTrainer
from bapo_trl.batch.losses import CLIPPED_LOSS_TYPES
from tests.helpers.commands import succeeded
from tests.helpers.forked import run_function
from tests.helpers.ranks import finish, read_ranks
from tests.helpers.toy import digits_reward, ending_model, toy_dataset, toy_run, training_logs
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
    return {
        key: value[rows.to(value.device)] if value.dim() and len(value) == len(rows) else value
        for key, value in inputs.items()
    }


def row_of(inputs, row):
    return {key: value[row : row + 1] if value.dim() else value for key, value in inputs.items()}


def gradients(folder, case: dict, model=None, **settings) -> Gradients:
    has_bounds = {**case, **settings}["loss_type"] in CLIPPED_LOSS_TYPES
    fixed = FIXED if has_bounds and settings.get("search_scope") != "batch" else {}
    settings = {**fixed, **case, "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, **settings}
    settings = {"micro_batch_layout": "padded", **settings}  # the samples of a micro-batch are those of TRL's
    reward = often_tied if "replay_zero_advantage" in settings else digits_reward
    return toy_run(folder, model or ending_model(), Gradients, reward_funcs=reward, **settings)


REPLAYED = {"replay_fraction": 0.5, "replay_max_reuse": 4}


def are_those_of_the_samples(found, expected, num_rows, full: int) -> None:
    """See that the gradients of all updates are as expected; some are `full`, others have fewer rows and train."""
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))
    assert max(num_rows) == full
    assert any(0 < count < full and gradient.any() for count, gradient in zip(num_rows, expected, strict=True))


@pytest.mark.trainings
@pytest.mark.parametrize(
    ("case", "full", "settings"),
    [
        *((SHORT_FIRST_BATCH, 8, {"loss_type": name}) for name in MEAN_OF_ROWS),
        (SHORT_FIRST_BATCH, 8, {"loss_type": "dapo"}),
        (FEW_QUEUED_ROWS, 12, {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
        (FEW_QUEUED_ROWS, 12, {"loss_type": "grpo", "search_scope": "batch", "gradient_checkpointing": False}),
        (SHORT_FIRST_BATCH, 8, {"loss_type": "grpo", **REPLAYED}),
        (SHORT_FIRST_BATCH, 8, {"loss_type": "grpo", "entropy_coef": 0.3}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if "loss_type" in str(value) else "",
)
def test_the_gradient_of_an_update_is_that_of_its_samples(tmp_path, case, full, settings):
    trainer = gradients(tmp_path, case, **settings)
    are_those_of_the_samples(trainer.found, trainer.expected, trainer.num_rows, full)


@pytest.mark.trainings
@pytest.mark.parametrize(("passes", "num_rows"), [(1, [12 + 24, 24 + 24]), (2, [2 * 12, 2 * 24])])
def test_an_update_of_two_passes_counts_the_rows_of_both(tmp_path, passes, num_rows):
    """6 micro-batches of 4 rows a pass, 12 an update: over 12 samples at first, the next generation has 24."""
    settings = {"gradient_accumulation_steps": 12, "max_steps": 2, "trainer_args": {"train_dataset": toy_dataset(80)}}
    trainer = gradients(tmp_path, {**SHORT_FIRST_BATCH, "num_iterations": passes}, loss_type="grpo", **settings)
    are_those_of_the_samples(trainer.found, trainer.expected, trainer.num_rows, 48)
    assert trainer.num_rows == num_rows


def test_the_kl_term_is_a_mean_over_the_samples(tmp_path):
    ending_model().save_pretrained(tmp_path / "model")  # where TRL finds the reference
    trainer = gradients(tmp_path, SHORT_FIRST_BATCH, str(tmp_path / "model"), loss_type="grpo", beta=2.0)
    are_those_of_the_samples(trainer.found, trainer.expected, trainer.num_rows, 8)
    assert trainer.beta == 2.0


def test_rows_that_trl_masks_count_as_with_trl(tmp_path):
    """`mask_truncated_completions`: no row is a copy, and the mean of `grpo` is over all of them."""
    settings = {"mask_truncated_completions": True, "max_completion_length": 3, "num_iterations": 1}
    trainer = gradients(tmp_path, settings, loss_type="grpo")
    assert max(trainer.num_rows) < 12
    for found, samples, count in zip(trainer.found, trainer.expected, trainer.num_rows, strict=True):
        torch.testing.assert_close(found, samples * count / 12, rtol=1e-4, atol=1e-6)
    assert any(samples.any() for samples in trainer.expected)


@pytest.mark.parametrize(("loss_type", "entropy_coef"), [("grpo", 0.0), ("bnpo", 0.0), ("dapo", 0.3)])
def test_micro_batches_of_copies_alone_count_in_no_mean(tmp_path, loss_type, entropy_coef):
    """One group of 2 rows is there for 6 micro-batches of 4."""
    settings = {"partial_rollout_oversampling": 1.9, "loss_type": loss_type, "entropy_coef": entropy_coef}
    trainer = gradients(tmp_path, SHORT_FIRST_BATCH, **settings)
    assert sorted(trainer.num_rows[:3]) in ([0, 0, 2], [0, 1, 1])
    are_those_of_the_samples(trainer.found, trainer.expected, trainer.num_rows, 8)
    first = next(log for log in training_logs(trainer) if "partial/masked" in log)
    assert first["partial/masked"] == 22


def train_on_a_rank(folder: str, settings: str) -> None:
    trainer = gradients(folder, json.loads(settings))
    found, expected = (torch.stack(each).tolist() for each in (trainer.found, trainer.expected))
    finish(trainer, folder, num_rows=trainer.num_rows, found=found, expected=expected)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("case", "full", "settings"),
    [
        (SHORT_FIRST_BATCH, 16, {"loss_type": "grpo"}),
        (SHORT_FIRST_BATCH, 16, {"loss_type": "bnpo", "partial_rollout_oversampling": 1.9}),
        (FEW_QUEUED_ROWS, 24, {"loss_type": "dr_grpo"}),
    ],
    ids=["partial-grpo", "partial-bnpo", "replay-dr_grpo"],
)
def test_rows_are_counted_over_ranks(tmp_path, case, full, settings):
    succeeded(run_function(train_on_a_rank, tmp_path, json.dumps({**case, **settings}), ranks=2))
    for rank in read_ranks(tmp_path):
        found, expected = torch.tensor(rank["found"]), torch.tensor(rank["expected"])
        are_those_of_the_samples(found, expected, rank["num_rows"], full)
