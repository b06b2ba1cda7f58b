"""TRL's default vLLM mode, colocate, with a scripted `vllm.LLM`: which tokens, by which weights, at which rows."""

import pytest
import torch
from transformers import TrainerCallback

from tests.helpers.alike import assert_same_weights
from tests.helpers.scores import score
from tests.helpers.scripted_llm import StaleLLM, colocate_trainer
from tests.helpers.toy import ending_model, training_logs


pytestmark = pytest.mark.trainings


COMMON = {"max_completion_length": 40, "vllm_importance_sampling_mode": "token_truncate"}
SETTINGS = {
    "plain": {},
    "replay": {"replay_capacity": 48, "replay_fraction": 0.5, "replay_max_staleness": 9},
    "partial rollouts": {"partial_rollout_oversampling": 1.5, "partial_rollout_chunk_length": 2},
}
SETTINGS["both, with sleep"] = {**SETTINGS["replay"], **SETTINGS["partial rollouts"], "vllm_enable_sleep_mode": True}


class Snapshots(TrainerCallback):
    """The weights of each policy version, and the batches that were trained on."""

    def __init__(self, trainer):
        self.weights = {0: self._copy(trainer.model)}
        self.batches = []
        compute_loss = trainer._compute_loss

        def kept(model, inputs):
            self.batches.append(inputs)
            return compute_loss(model, inputs)

        trainer._compute_loss = kept
        trainer.add_callback(self)

    def on_step_end(self, args, state, control, model, **kwargs):
        self.weights[state.global_step] = self._copy(model)

    def _copy(self, model):
        return {name: weight.detach().clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_tokens_and_log_probs_are_at_their_rows_by_the_weights_of_their_version(settings, tmp_path, monkeypatch):
    trainer, llm = colocate_trainer(
        monkeypatch, tmp_path / "run", model=ending_model(), max_steps=12, **COMMON, **settings
    )
    seen = Snapshots(trainer)
    trainer.train()

    # What each call sampled, it sampled by the weights of a version, the latest at that time
    asked_at = [
        [version for version, known in seen.weights.items() if all(map(torch.equal, known.values(), weights.values()))]
        for _, weights in llm.requests
    ]
    assert all(asked_at)
    assert [versions[0] for versions in asked_at] == sorted(versions[0] for versions in asked_at)
    sampled = {
        (tuple(output.prompt_token_ids), token, next(iter(logps.values())).logprob)
        for outputs, _ in llm.requests
        for output in outputs
        for completion in output.outputs
        for token, logps in [(tuple(completion.token_ids), completion.logprobs[0])]
    }
    oracle, checked, several = ending_model().eval(), 0, 0
    for batch in seen.batches:
        versions = batch.get("token_versions")
        for row in range(len(batch["completion_ids"])):
            mask = batch["completion_mask"][row].bool()
            if not mask.any():
                continue
            prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()]
            tokens = batch["completion_ids"][row][mask]
            of_tokens = batch["policy_version"][row].expand(len(tokens)) if versions is None else versions[row][mask]
            several += len(of_tokens.unique()) > 1
            for version in of_tokens.unique().tolist():
                here = of_tokens == version
                expected = score(oracle, prompt, tokens, seen.weights[version])[here]
                own = batch["old_per_token_logps"][row][mask][here]
                torch.testing.assert_close(own, expected, rtol=0, atol=1e-5)
                from_vllm = batch["sampling_per_token_logps"][row][mask][here]
                torch.testing.assert_close(from_vllm, expected, rtol=0, atol=1e-5)
                checked += 1
            first = batch["sampling_per_token_logps"][row][mask][0].item()
            if versions is None:
                assert any(
                    asked == tuple(prompt.tolist()) and got == tuple(tokens.tolist())
                    and logp == pytest.approx(first, abs=1e-6)
                    for asked, got, logp in sampled
                )  # fmt: skip
    assert checked > 40
    assert (several > 0) == ("partial_rollout_oversampling" in settings)
    assert max(log["ratio/max"] or 0 for log in training_logs(trainer)) > 1.05  # the weights did change


@pytest.mark.parametrize("sleeps", [False, True], ids=["awake", "sleep"])
def test_weights_are_loaded_before_each_generation(sleeps, tmp_path, monkeypatch):
    trainer, llm = colocate_trainer(monkeypatch, tmp_path / "run", vllm_enable_sleep_mode=sleeps, max_steps=8)
    trainer.train()
    generation = ["wake ['weights']", "load", "reset", "wake ['kv_cache']", "generate", "sleep 2"]
    if not sleeps:
        generation = ["load", "reset", "generate"]
    first = ["sleep 2"] if sleeps else []
    assert llm.events == first + generation * 2


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_weights_that_are_not_taken_end_the_run(settings, tmp_path, monkeypatch):
    settings = {**settings, "vllm_enable_sleep_mode": False}  # asleep, it would have none to keep
    trainer, _ = colocate_trainer(
        monkeypatch, tmp_path / "run", StaleLLM, learning_rate=0.2, max_steps=16,
        model=ending_model(), **COMMON, **settings,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="Either the server's weights are not the trainer's"):
        trainer.train()
    assert trainer.state.global_step == trainer.args.updates_per_generation  # the first generation by old weights


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_resumed_run_equals_an_uninterrupted_one(settings, tmp_path, monkeypatch):
    settings = {
        **COMMON, "model": ending_model(), "max_steps": 12, "save_strategy": "steps", "save_steps": 4, **settings,
    }  # fmt: skip
    straight, _ = colocate_trainer(monkeypatch, tmp_path / "straight", **settings)
    straight.train()
    monkeypatch.undo()
    resumed, llm = colocate_trainer(monkeypatch, tmp_path / "straight-again", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-8"))
    assert_same_weights(straight, resumed)
    assert "load" in llm.events  # its folder holds the weights of the start
