"""`use_sampler_logps`: vLLM's log-probabilities stand for those of the policy that sampled, without a scoring pass."""

import math

import pytest
import torch

from bapo_trl.vllm_server.mismatch import MISMATCH_METRICS
from tests.helpers.fake_vllm import FakeVLLM, vllm_trainer
from tests.helpers.toy import training_logs


SGD = {"optim": "sgd", "learning_rate": 0.05, "vllm_importance_sampling_mode": "token_truncate"}


def run(monkeypatch, folder, server=FakeVLLM, **settings):
    trainer = vllm_trainer(monkeypatch, folder, server, **{**SGD, **settings})
    trainer.scored = 0

    def count(module, arguments, keywords):
        trainer.scored += 0 if torch.is_grad_enabled() else len(keywords["input_ids"])

    trainer.model.register_forward_pre_hook(count, with_kwargs=True)
    trainer.train()
    return trainer


@pytest.mark.trainings
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"replay_fraction": 0.5},
        {"partial_rollout_oversampling": 1.5, "partial_rollout_chunk_length": 3},
        {"vllm_importance_sampling_correction": False, "steps_per_generation": 2, "num_iterations": 1},
    ],
    ids=["default", "replay", "partial rollouts", "no correction, one update per generation"],
)
def test_a_sampler_with_the_same_arithmetic_gives_the_same_training_with_fewer_passes(monkeypatch, tmp_path, settings):
    scored, taken = (
        run(monkeypatch, tmp_path / str(takes), use_sampler_logps=takes, **settings) for takes in (False, True)
    )
    for one, other in zip(scored.model.parameters(), taken.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
    if settings.get("vllm_importance_sampling_correction", True):
        assert taken.scored < 0.7 * scored.scored
    assert set(MISMATCH_METRICS) <= training_logs(taken)[0].keys()  # of the first micro-batch


def test_a_token_without_a_log_probability_takes_the_current_one(monkeypatch, tmp_path):
    class Lacking(FakeVLLM):
        def generate(self, *args, **kwargs):
            prompts, ids, logps, rest = super().generate(*args, **kwargs)
            return (
                prompts,
                ids,
                [[[None] if place == 1 else each for place, each in enumerate(row)] for row in logps],
                rest,
            )

    logs = training_logs(run(monkeypatch, tmp_path, Lacking, use_sampler_logps=True, vllm_logp_tolerance=None))
    assert len(logs) == 4
    assert all(math.isfinite(log["ratio/max"]) for log in logs if "ratio/max" in log)
