"""Copies that keep the size of a batch train as if they were not there: an update has the gradient of its samples."""

import json

import pytest
import torch

from tests.helpers.commands import succeeded
from tests.helpers.filler_oracle import FEW_QUEUED_ROWS, MEAN_OF_ROWS, SHORT_FIRST_BATCH, gradients
from tests.helpers.forked import run_python
from tests.helpers.ranks import read_ranks
from tests.helpers.toy import ending_model, toy_dataset, training_logs


REPLAYED = {"replay_fraction": 0.5, "replay_max_reuse": 4}


def are_those_of_the_samples(found, expected, num_rows, full: int) -> None:
    """See that the gradients of all updates are as expected; some are `full`, others have fewer rows and train."""
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))
    assert max(num_rows) == full
    assert any(0 < count < full and gradient.any() for count, gradient in zip(num_rows, expected, strict=True))


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
    succeeded(run_python(["-m", "tests.helpers.filler_oracle", tmp_path, json.dumps({**case, **settings})], ranks=2))
    for rank in read_ranks(tmp_path):
        found, expected = torch.tensor(rank["found"]), torch.tensor(rank["expected"])
        are_those_of_the_samples(found, expected, rank["num_rows"], full)
