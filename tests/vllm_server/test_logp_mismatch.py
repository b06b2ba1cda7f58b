"""Log-probabilities of a sampler that is not the trainer: metrics, the check, settings that bias."""

import math
import warnings

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from bapo_trl import BAPOTrainer
from bapo_trl.batch.sampler import read_sampler_logps
from bapo_trl.vllm_server.mismatch import MISMATCH_METRICS, compare_with_sampler
from tests.helpers.alike import assert_same_weights
from tests.helpers.fake_vllm import FakeVLLM, vllm_trainer
from tests.helpers.toy import toy_model, toy_run, toy_trainer, training_logs


def batch(**extra):
    """Two rows of 3 and 2 tokens; the trainer's probabilities are e^0.1, 1, e^-0.2 and 2, 0.5 times the sampler's."""
    two = math.log(2)
    return {
        "completion_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
        "old_per_token_logps": torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -1.0, 50.0]]),
        "sampling_per_token_logps": torch.tensor([[-1.1, -2.0, -2.8], [-1.0 - two, -1.0 + two, 0.0]]),
        **extra,
    }


def compare(batch, is_per_sequence=False):
    metrics, difference = compare_with_sampler(
        read_sampler_logps(batch, batch["old_per_token_logps"]), is_per_sequence, lambda tensor: tensor
    )
    return {name.removeprefix("sampling/"): value for name, value in metrics.items()}, difference


def test_raw_ratios_of_tokens():
    used = torch.tensor([[math.exp(0.1), 1, math.exp(-0.2)], [1.5, 0.0, 1.0]])
    ratios = [math.exp(0.1), 1, math.exp(-0.2), 2, 0.5]
    for correction, lost in (({}, 0), ({"importance_sampling_ratio": used}, 1 / 5)):
        metrics, difference = compare(batch(**correction))
        assert metrics["raw_importance_sampling_ratio/mean"] == pytest.approx(sum(ratios) / 5)
        assert metrics["raw_importance_sampling_ratio/min"] == pytest.approx(0.5)
        assert metrics["raw_importance_sampling_ratio/max"] == pytest.approx(2)
        assert metrics["truncated_share"] == metrics["masked_share"] == lost
        assert difference == pytest.approx((0.1 + 0 + 0.2 + 2 * math.log(2)) / 5)


def test_raw_ratios_of_sequences():
    metrics, _ = compare(batch(importance_sampling_ratio=torch.tensor([[math.exp(-0.1)], [0.0]])), True)
    assert metrics["raw_importance_sampling_ratio/min"] == pytest.approx(math.exp(-0.1))  # 0.1 + 0 - 0.2
    assert metrics["raw_importance_sampling_ratio/max"] == pytest.approx(1)  # log 2 - log 2
    assert (metrics["truncated_share"], metrics["masked_share"]) == (0, 0.5)


def test_tokens_of_tools_and_tokens_without_log_probs_do_not_count():
    without = batch(tool_mask=torch.tensor([[1, 1, 0], [1, 1, 1]]))
    without["sampling_per_token_logps"][0, 0] = math.nan
    metrics, difference = compare(without)
    assert metrics["raw_importance_sampling_ratio/mean"] == pytest.approx((1 + 2 + 0.5) / 3)
    assert difference == pytest.approx(2 * math.log(2) / 3)


class Sampler(BAPOTrainer):
    """Reports, as vLLM would, the trainer's log-probabilities of before, with an error."""

    error = 0.0

    def _generate_and_score_completions(self, inputs):
        self.sampler_error = torch.tensor(self.error)
        return super()._generate_and_score_completions(inputs)

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        completion_ids, _ = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        logps = []
        for prompt, completion in zip(prompt_ids, completion_ids, strict=True):
            ids = torch.tensor([[*prompt, *completion]], device=self.model.device)
            with torch.no_grad():
                logits = self.model(ids).logits[0, len(prompt) - 1 : -1].cpu()
            own = logits.log_softmax(-1).gather(1, torch.tensor(completion).unsqueeze(1)).squeeze(1)
            logps.append((own + self.sampler_error).tolist())
        return completion_ids, logps


class Wrong(Sampler):
    error = 0.2


def test_a_comparison_with_the_sampler_leaves_an_on_policy_run_with_ratios_of_one(tmp_path):
    """Dropout makes any other pass another one."""
    args = {"num_iterations": 1, "steps_per_generation": 2, "vllm_logp_tolerance": None}
    args["vllm_importance_sampling_correction"] = False
    model = toy_model(attention_dropout=0.3)
    trainer = toy_run(tmp_path, model, trainer_class=Sampler, **args)
    for log in training_logs(trainer):
        assert log["ratio/max"] == log["ratio/min"] == 1


@pytest.mark.parametrize("steps_per_generation", [4, 2])  # the second is on-policy: TRL leaves old log-probs out
def test_the_sampler_is_compared_at_every_generation(tmp_path, steps_per_generation):
    args = {"num_iterations": 1, "steps_per_generation": steps_per_generation}
    trainer = toy_run(tmp_path, trainer_class=Sampler, **args)
    generations = [log for log in training_logs(trainer) if "reward" in log]
    assert len(generations) == 8 // steps_per_generation
    for log in generations:
        assert set(MISMATCH_METRICS) <= set(log)
        assert log["sampling/raw_importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-4)


@pytest.mark.trainings
def test_a_difference_beyond_the_tolerance_stops_the_training(tmp_path):
    with pytest.raises(RuntimeError, match=r"differ by 0\.2 nats per token .*`vllm_logp_tolerance` is 0\.1"):
        toy_trainer(tmp_path, trainer_class=Wrong).train()
    toy_trainer(tmp_path, trainer_class=Wrong, vllm_logp_tolerance=0.3).train()
    toy_trainer(tmp_path, trainer_class=Wrong, vllm_logp_tolerance=None).train()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"top_p": 0.9}, "`top_p` 0.9"),
        ({"repetition_penalty": 1.1}, "`repetition_penalty` 1.1"),
        ({"generation_kwargs": {"top_p": 0.5}}, "`top_p` 0.5"),
        ({"generation_kwargs": {"no_repeat_ngram_size": 2}}, "`no_repeat_ngram_size` 2"),
    ],
)
def test_settings_that_bias_the_ratio_are_warned_of(tmp_path, settings, named):
    with pytest.warns(UserWarning, match=f"drawn with {named}, so the importance ratios are biased"):
        toy_trainer(tmp_path, **settings)


SETTINGS_OF_VLLM = [
    ({"top_p": 0.8}, "`top_p` 0.8"),
    ({"generation_kwargs": {"logit_bias": {"3": 3.0}}}, "`logit_bias` {'3': 3.0}"),
    ({"vllm_structured_outputs_regex": r"\d+"}, r"`vllm_structured_outputs_regex` \d+"),
]


@pytest.mark.trainings
@pytest.mark.parametrize(("settings", "named"), SETTINGS_OF_VLLM)
def test_what_a_setting_explains_does_not_stop_the_training(monkeypatch, tmp_path, settings, named):
    trainer = vllm_trainer(monkeypatch, tmp_path, vllm_logp_tolerance=1e-4, max_steps=8, **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    (message,) = (str(warning.message) for warning in caught if "differ by" in str(warning.message))
    assert f"The samples are drawn with {named}, which" in message
    assert trainer.vllm_generation.num_syncs == 2  # it was said once of two generations


# Log-probabilities of a rollout function


def rollouts(prompts, trainer):
    """Complete the prompts with the trainer's own model; the log-probabilities are placeholders, which TRL allows."""
    prompt_ids, *_ = trainer._tokenize_prompts(prompts)
    completion_ids, _ = trainer._generate_single_turn(prompt_ids, None, {}, trainer.num_generations)
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": completion_ids,
        "logprobs": [[0.0] * len(row) for row in completion_ids],
    }


@pytest.mark.trainings
@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
@pytest.mark.parametrize("is_on_policy", [False, True])
def test_a_rollout_function_without_vllm_trains_as_under_grpo(tmp_path, is_on_policy):
    settings = {"steps_per_generation": 2, "num_iterations": 1} if is_on_policy else {}

    def run(**arguments):
        model, parts = toy_model(attention_dropout=0.1), {"rollout_func": rollouts}
        return toy_run(tmp_path, trainer_args=parts, model=model, **settings, **arguments)

    grpo = run(trainer_class=GRPOTrainer, config_class=GRPOConfig, epsilon=0.2, epsilon_high=0.28)
    bounds = {"ratio_lower_start": 0.8, "ratio_lower_max": 0.8, "ratio_upper_start": 1.28, "ratio_upper_max": 1.28}
    bapo = run(micro_batch_layout="padded", **bounds)
    assert_same_weights(grpo, bapo)
    assert not any(name in log for log in training_logs(bapo) for name in MISMATCH_METRICS)


@pytest.mark.trainings
@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
def test_placeholders_over_vllm_are_not_compared_without_a_correction(monkeypatch, tmp_path):
    parts = {"trainer_args": {"rollout_func": rollouts}, "max_steps": 1}
    vllm_trainer(monkeypatch, tmp_path, vllm_importance_sampling_correction=False, **parts).train()
    with pytest.raises(RuntimeError, match="must return vLLM's"):
        vllm_trainer(monkeypatch, tmp_path, **parts).train()


def test_the_weights_are_sent_before_any_forward_pass(monkeypatch, tmp_path):
    """Under FSDP2, a forward pass without a backward pass leaves some that cannot be sent."""
    events = []

    class Noting(FakeVLLM):
        def sync_weights(self):
            events.append("sent")
            super().sync_weights()

    trainer = vllm_trainer(monkeypatch, tmp_path, Noting, replay_fraction=0.5, max_steps=1)
    trainer.model.register_forward_hook(lambda *args: events.append("forward"))
    trainer.train()
    assert events[:2] == ["sent", "forward"]
