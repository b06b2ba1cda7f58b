"""Partial rollouts, and restarts, over a vLLM server. What a live one does is in tests/e2e."""

from types import SimpleNamespace

import pytest
import torch

from bapo_trl.rollouts.partial import PartialRollouts
from bapo_trl.rollouts.pool import RolloutPool
from tests.helpers.fake_vllm import FakeVLLM, vllm_trainer
from tests.helpers.toy import training_logs
from tests.rollouts.test_rollout_rounds import (
    PARTIAL,
    Recording,
    ending_model,
    prompts_of_many_lengths,
    share_of_digits,
    trainer_of,
)  # fmt: skip


pytestmark = pytest.mark.trainings


def server_trainer(monkeypatch, tmp_path, server=FakeVLLM, **settings):
    settings = {
        **PARTIAL, "max_completion_length": 16, "max_steps": 12, "learning_rate": 2e-3,
        "vllm_importance_sampling_mode": "token_truncate", **settings,
    }  # fmt: skip
    return vllm_trainer(
        monkeypatch, tmp_path, server=server, model=ending_model(), trainer_class=Recording,
        reward_funcs=share_of_digits, trainer_args={"train_dataset": prompts_of_many_lengths()}, **settings,
    )  # fmt: skip


class BiasedOnce(FakeVLLM):
    """The first policy's tokens come with log-probabilities that are too high by 0.5."""

    def _report(self, processed):
        return processed.log_softmax(-1) + (0.5 if self.num_syncs == 1 else 0)


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_truncate"])
def test_trl_corrects_by_the_stitched_ratio_and_the_comparison_is_of_the_latest_segments(monkeypatch, tmp_path, mode):
    settings = {"vllm_importance_sampling_mode": mode, "vllm_logp_tolerance": None}
    trainer = server_trainer(monkeypatch, tmp_path, BiasedOnce, **settings)
    trainer.train()
    num_biased = 0
    for batch in trainer.batches:
        mask, versions = batch["completion_mask"].bool(), batch["token_versions"]
        biased = (versions == 0) & mask
        num_biased += int((biased.any(dim=1) & (mask & (versions > 0)).any(dim=1)).sum())
        log_ratio = torch.where(biased, -0.5, 0.0)
        if mode == "token_truncate":
            expected, rows = log_ratio.exp()[mask], batch["importance_sampling_ratio"][mask]
        else:
            trains = mask.any(dim=1)
            expected, rows = log_ratio.sum(dim=1).exp()[trains], batch["importance_sampling_ratio"][trains, 0]
        torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-5)
    assert num_biased > 10
    first, second, *_ = (log for log in training_logs(trainer) if "reward" in log)
    assert first["sampling/raw_importance_sampling_ratio/max"] < 0.7
    # The first policy's tokens are still in the batch, and parts of completions that went on under the second
    assert second["sampling/raw_importance_sampling_ratio/max"] == pytest.approx(1, abs=1e-5)


class RestartingInRequest(FakeVLLM):
    """Started anew during a request, which TRL's client repeats: the answer is that of the first weights."""

    def generate(self, prompts, images, num_generations, profiler=None):
        if len(self.num_prompts) == 1:
            self.restart()
        return super().generate(prompts, images, num_generations)


def test_what_a_server_sampled_before_it_got_the_weights_is_sampled_again(monkeypatch, tmp_path):
    trainer = vllm_trainer(monkeypatch, tmp_path, server=RestartingInRequest, num_iterations=1)
    with pytest.warns(UserWarning, match="server was restarted"):
        trainer.train()
    for log in training_logs(trainer):
        if "reward" in log:
            assert log["sampling/sampling_logp_difference/max"] < 1e-5


def test_another_sampler_than_that_of_the_checkpoint_is_rejected(monkeypatch, tmp_path):
    saves = {"save_strategy": "steps", "save_steps": 3, "max_steps": 3}
    server_trainer(monkeypatch, tmp_path, **saves).train()
    with pytest.raises(ValueError, match=r"`use_vllm` is False, but .* were begun with vLLM"):
        trainer_of(tmp_path, **saves, max_completion_length=16).train(resume_from_checkpoint=True)


def test_all_ranks_send_equally_many_prompts():
    """TRL hands each rank its part of the server's answer by the number of its own prompts."""
    sent, other = [], 5

    class Rank(PartialRollouts):
        """One rank, beside another that always has `other` completions in progress and is never done."""

        def _gather(self, numbers):
            if len(numbers) == 3:  # has enough, cap, number in progress
                return [numbers, [len(sent) >= 2, 3, other]]
            return [numbers, numbers]

        def _continue(self, prompts, cap):
            sent.append(prompts)
            return [[5] * (cap - 1) + [1] for _ in prompts], None

        def _score(self, prompts, completions):
            return [[-1.0] * len(row) for row in completions]

    args = SimpleNamespace(
        groups_per_generation=1, groups_carried_over=0, partial_rollout_chunk_length=3, use_sampler_logps=False
    )
    rank = Rank()
    rank._run, rank.pool = SimpleNamespace(args=args, is_within_update=False), RolloutPool(2, 6, [1], num_ranks=2)
    batch = rank._generate([({"prompt": "0"}, [7, 8])], 0, None)
    assert [len(prompts) for prompts in sent] == [5, 5]
    assert batch.token_ids == [[5, 5, 1], [5, 5, 1]]
    assert sent[1] == [[7]] * 5  # nothing of its own is left: dummies alone
