"""The trainer that generates again until no group is tied, which `replay_zero_advantage` is measured against."""

import pytest

from benchmarks.tied_groups import CountingTrainer, RefillingTrainer
from tests.helpers.toy import toy_trainer, training_logs


def has_a_digit(completions, **kwargs):
    """0 or 1, so that groups of three often tie."""
    return [float(any(c.isdigit() for c in text[:2])) for text in completions]


def trained(folder, trainer_class):
    batches = []

    class Watched(trainer_class):
        def _generate_and_score_completions(self, inputs):
            batches.append((len(inputs), super()._generate_and_score_completions(inputs)))
            return batches[-1][1]

    trainer = toy_trainer(folder, trainer_class=Watched, reward_funcs=has_a_digit, num_iterations=1)
    trainer.train()
    return trainer, batches


def test_a_refilled_batch_is_full_and_has_no_tied_group(tmp_path):
    plain, left = trained(tmp_path / "plain", CountingTrainer)
    trainer, refilled = trained(tmp_path / "refilled", RefillingTrainer)
    assert any((batch["advantages"].view(-1, 3) == 0).all(dim=1).any() for _, batch in left)
    for size, batch in refilled:
        groups = batch["advantages"].view(-1, 3)
        assert len(batch["prompt_ids"]) == size
        assert (groups != 0).any(dim=1).all()
        assert (
            batch["prompt_ids"].view(-1, 3, batch["prompt_ids"].shape[1]).diff(dim=1) == 0
        ).all()  # groups are whole
        assert groups.sum(dim=1).tolist() == pytest.approx([0.0] * len(groups), abs=1e-5)
        assert batch["num_items_in_batch"] == batch["completion_mask"].sum()
    assert len(training_logs(trainer)) == len(training_logs(plain)) == 4


def test_tokens_of_dropped_groups_count(tmp_path):
    plain, left = trained(tmp_path / "plain", CountingTrainer)
    assert plain.generated_tokens == sum(int(batch["completion_mask"].sum()) for _, batch in left)
    trainer, refilled = trained(tmp_path / "refilled", RefillingTrainer)
    assert trainer.generated_tokens > sum(int(batch["completion_mask"].sum()) for _, batch in refilled)
