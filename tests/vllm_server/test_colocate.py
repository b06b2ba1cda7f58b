"""
TRL's default vLLM mode, colocate, with a scripted `vllm.LLM`: what `tests/e2e/test_colocate.py` cannot show with the
real one, which has no sleep mode on a CPU.
"""

import pytest
import torch

from tests.helpers.alike import assert_same_weights
from tests.helpers.fake_vllm import StaleLLM, colocate_trainer
from tests.helpers.scores import assert_scored_by_its_policy, score
from tests.helpers.toy import ending_model, training_logs
from tests.rollouts.test_rollout_rounds import Recording, trained_rows


pytestmark = pytest.mark.trainings


REPLAY_AND_PARTIAL_ROLLOUTS = {
    "max_completion_length": 40, "vllm_importance_sampling_mode": "token_truncate", "replay_capacity": 48,
    "replay_fraction": 0.5, "replay_max_staleness": 9, "partial_rollout_oversampling": 1.5,
    "partial_rollout_chunk_length": 2,
}  # fmt: skip
ASLEEP_BETWEEN = {**REPLAY_AND_PARTIAL_ROLLOUTS, "vllm_enable_sleep_mode": True}


def test_tokens_and_log_probs_are_at_their_rows_by_the_weights_of_their_version(tmp_path, monkeypatch):
    trainer, llm = colocate_trainer(
        monkeypatch, tmp_path / "run", model=ending_model(), trainer_class=Recording, max_steps=12,
        **ASLEEP_BETWEEN,
    )  # fmt: skip
    trainer.train()

    # What each call sampled, it sampled by the weights of a version, the latest at that time
    known = [(version, [*weights.values()]) for version, weights in trainer.weights.items()]
    asked_at = [
        [version for version, weights in known if all(map(torch.equal, weights, asked.values()))]
        for _, asked in llm.requests
    ]
    assert all(asked_at)
    assert [versions[0] for versions in asked_at] == sorted(versions[0] for versions in asked_at)
    rows, model = list(trained_rows(trainer, "old_per_token_logps", "sampling_per_token_logps")), ending_model().eval()
    assert len(rows) > 40
    score_by = lambda version, *ids: score(model, *ids, trainer.weights[version])  # noqa: E731
    assert_scored_by_its_policy(rows, score_by, least_share=0.0)
    assert max(log.get("ratio/max", 0) for log in training_logs(trainer)) > 1.05  # the weights did change


@pytest.mark.parametrize("sleeps", [False, True], ids=["awake", "sleep"])
def test_weights_are_loaded_before_each_generation(sleeps, tmp_path, monkeypatch):
    trainer, llm = colocate_trainer(monkeypatch, tmp_path / "run", vllm_enable_sleep_mode=sleeps, max_steps=8)
    trainer.train()
    generation = ["wake ['weights']", "load", "reset", "wake ['kv_cache']", "generate", "sleep 2"]
    if not sleeps:
        generation = ["load", "reset", "generate"]
    first = ["sleep 2"] if sleeps else []
    assert llm.events == first + generation * 2


def test_weights_that_are_not_taken_end_the_run(tmp_path, monkeypatch):
    # Asleep, it would have none to keep
    trainer, _ = colocate_trainer(
        monkeypatch, tmp_path / "run", StaleLLM, learning_rate=0.2, max_steps=16,
        model=ending_model(), **REPLAY_AND_PARTIAL_ROLLOUTS,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="Either the server's weights are not the trainer's"):
        trainer.train()
    assert trainer.state.global_step == trainer.args.updates_per_generation  # the first generation by old weights


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, monkeypatch):
    settings = {**ASLEEP_BETWEEN, "model": ending_model(), "max_steps": 12, "save_strategy": "steps", "save_steps": 4}
    straight, _ = colocate_trainer(monkeypatch, tmp_path / "straight", **settings)
    straight.train()
    monkeypatch.undo()
    resumed, llm = colocate_trainer(monkeypatch, tmp_path / "straight-again", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-8"))
    assert_same_weights(straight, resumed)
    assert "load" in llm.events  # its folder holds the weights of the start
