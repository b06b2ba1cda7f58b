"""Tokens that the policy did not write: whatever their log-probabilities, an update is as if they were of ratio 1."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from bapo_trl import BAPOTrainer
from bapo_trl.batch.policy_loss import policy_mask
from bapo_trl.tasks import character_tokenizer
from tests.helpers.alike import assert_same_logs, assert_same_weights
from tests.helpers.rollouts import multi_turn
from tests.helpers.toy import ON_GPU, ending_model, toy_dataset, toy_run, toy_trainer, training_logs
from tests.test_equivalence import FIXED


SMALL = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 2, "num_iterations": 2,
    "num_generations": 2, "max_steps": 2,
}  # fmt: skip
AHEAD = {"search_scope": "batch"}
KEYS = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio")


class FarMasked(BAPOTrainer):
    """Gives masked tokens other values: at -200, their log-ratio is beyond 88.7, from which `exp` is infinite."""

    value = -200.0

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        masked = policy_mask(output) == 0
        assert masked[output["completion_mask"].bool()].any()  # those of the environment, not only padding
        for key in KEYS:
            if key in output and output[key].shape == masked.shape:
                output[key] = torch.where(masked, self.value, output[key])
        return output


class Infinite(FarMasked):
    value = math.inf


class Corrected(BAPOTrainer):
    """Corrects for a sampler with log-probabilities of its own, as with vLLM."""

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        logps = output["old_per_token_logps"]
        noise = torch.rand(logps.shape, generator=torch.Generator().manual_seed(0)).to(logps.device)
        output |= {
            "sampling_per_token_logps": logps - noise,
            "importance_sampling_ratio": 1 + noise * policy_mask(output),
        }
        return output

    def _compute_loss(self, model, inputs):
        self.use_vllm = True  # in the loss alone
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self.use_vllm = False


class FarCorrected(FarMasked, Corrected):
    value = math.nan


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A folder with a model that does not write a 7, which the environment says after each turn."""
    folder = tmp_path_factory.mktemp("model")
    made = ending_model()
    (seven,) = character_tokenizer()("7")["input_ids"]
    made.lm_head.weight.data[seven, 0] = -60.0
    made.save_pretrained(folder)
    return str(folder)


def run(folder, model, trainer_class, **settings):
    torch.manual_seed(0)
    if settings.get("loss_type") == "cispo":
        settings["epsilon_high"] = 5.0
    return toy_run(folder, model, trainer_class, trainer_args={"rollout_func": multi_turn}, **{**SMALL, **settings})


def is_as_without_them(folder, model, trainer_class=FarMasked, other_class=BAPOTrainer, **settings):
    found = run(folder, model, trainer_class, **settings)
    expected = run(folder, model, other_class, **settings)
    assert_same_weights(found, expected)
    assert_same_logs(found, expected)
    assert max(log["grad_norm"] for log in training_logs(found)) > 0


@pytest.mark.trainings
@pytest.mark.parametrize(
    ("loss_type", "level", "trainer_class"),
    [
        *((name, "token", FarMasked) for name in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo")),
        *((name, "token", Infinite) for name in ("cispo", "vespo")),  # which cap the ratio of -200
        *((name, "sequence", Infinite) for name in ("grpo", "luspo")),
    ],
)
def test_a_masked_token_changes_no_update_under_any_loss(tmp_path, model, loss_type, level, trainer_class):
    is_as_without_them(tmp_path, model, trainer_class, loss_type=loss_type, importance_sampling_level=level)


@pytest.mark.trainings
@pytest.mark.parametrize(
    ("trainer_class", "settings"),
    [
        (FarMasked, {"beta": 0.1, "use_bias_correction_kl": True, "delta": 3.5, "entropy_coef": 0.1}),
        # The pass ahead of an update of two micro-batches
        (Infinite, {**AHEAD, "importance_sampling_level": "sequence", "contribution_weighting": "behavior_prob"}),
        (Infinite, {"search_scope": "carried_over", "negative_weight_min": 0.05, "top_entropy_quantile": 0.5}),
        (FarMasked, {**AHEAD, "num_iterations": 1, "max_steps": 4, "replay_fraction": 0.5, "beta": 0.1}),
    ],
    ids=["kl and delta", "look-ahead", "weight", "replay"],
)
def test_a_masked_token_changes_no_update_under_other_settings(tmp_path, model, trainer_class, settings):
    is_as_without_them(tmp_path, model, trainer_class, **settings)


@pytest.mark.trainings
@pytest.mark.parametrize("settings", [{}, {"loss_type": "vespo"}, {"off_policy_mask_threshold": 0.3}], ids=str)
def test_a_masked_token_changes_no_update_with_vllms_correction(tmp_path, model, settings):
    is_as_without_them(tmp_path, model, FarCorrected, Corrected, **AHEAD, **settings)


@pytest.mark.skipif(ON_GPU, reason="on an H200, TRL's own weights became NaN here")
def test_with_fixed_bounds_the_weights_are_those_of_grpo_trainer_bit_for_bit(tmp_path, model):
    found = run(tmp_path, model, FarMasked, beta=0.1, micro_batch_layout="padded", **FIXED)
    settings = {"epsilon": 0.2, "epsilon_high": 0.28, "config_class": GRPOConfig}
    expected = run(tmp_path, model, GRPOTrainer, beta=0.1, **settings)
    assert_same_weights(found, expected)
    assert_same_logs(expected, found)


@pytest.mark.trainings
def test_a_masked_token_that_the_policy_cannot_write_changes_nothing(tmp_path, model, monkeypatch):
    (seven,) = character_tokenizer()("7")["input_ids"]
    expected = run(tmp_path, model, BAPOTrainer, micro_batch_layout="padded")
    original = GRPOTrainer._get_per_token_logps_and_entropies

    def without_sevens(self, model, ids, mask, count, **kwargs):
        logps, entropies, aux_loss = original(self, model, ids, mask, count, **kwargs)
        is_seven = ids[:, -count:] == seven
        assert is_seven.any()
        entropies = entropies if entropies is None else torch.where(is_seven, math.nan, entropies)
        return torch.where(is_seven, -math.inf, logps), entropies, aux_loss

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", without_sevens)
    found = run(tmp_path, model, BAPOTrainer, micro_batch_layout="padded")
    assert_same_weights(found, expected)
    assert_same_logs(found, expected)


def test_a_masked_token_does_not_change_the_loss_of_an_evaluation(tmp_path, model):
    losses = []
    for trainer_class in (FarMasked, BAPOTrainer):
        torch.manual_seed(0)
        parts = {"rollout_func": multi_turn, "eval_dataset": toy_dataset(4)}
        start = AutoModelForCausalLM.from_pretrained(model)
        trainer = toy_trainer(tmp_path, start, trainer_class, beta=0.1, trainer_args=parts, **SMALL)
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[0] == losses[1]
