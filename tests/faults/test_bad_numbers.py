"""NaN, infinity and ratios far off: the update stays finite, or the run stops before it."""

import math

import pytest
import torch
from transformers import TrainerCallback

from bapo_trl import BAPOTrainer
from bapo_trl.clip_bounds import SCOPES
from bapo_trl.clip_bounds.grid import BoundGrid
from tests.helpers.alike import assert_same_tensors, weights_of
from tests.helpers.toy import toy_model, toy_trainer, training_logs


pytestmark = pytest.mark.trainings


LOSS_TYPES = ["grpo", "dapo", "luspo", "cispo", "sapo", "vespo"]  # the others differ by a factor
# Each loss in the default scope, and one in each other
LOSSES_AND_SCOPES = [
    *((loss_type, "carried_over") for loss_type in LOSS_TYPES),
    *(("dapo", scope) for scope in SCOPES if scope != "carried_over"),
]


def settings_of(loss_type: str) -> dict:
    cap = {"epsilon_high": 5.0} if loss_type == "cispo" else {}
    return {"loss_type": loss_type, "gradient_checkpointing": False, **cap}


class WeightsBefore(TrainerCallback):
    """Keeps the weights as each update began."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.weights = weights_of(model)


def stops(trainer, message: str, updates: int) -> None:
    """Train, and see that the error comes after so many updates, with the weights as these left them."""
    before = WeightsBefore()
    trainer.add_callback(before)
    with pytest.raises(RuntimeError, match=message):
        trainer.train()
    assert trainer.state.global_step == updates
    assert_same_tensors(before.weights, trainer.model.state_dict())


# Gradients


class BreaksGradient(BAPOTrainer):
    """Lets the gradient of the second update have a value that is not finite, behind a loss that is."""

    value = math.nan

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        if self.state.global_step == 1:
            loss.register_hook(lambda gradient: gradient * self.value)
        return loss


@pytest.mark.parametrize(("max_grad_norm", "bad"), [(1.0, math.nan), (0.0, math.inf)])
@pytest.mark.parametrize("scope", SCOPES)
def test_a_gradient_that_is_not_finite_stops_before_the_optimizer_step(tmp_path, max_grad_norm, bad, scope):
    class Broken(BreaksGradient):
        value = bad

    trainer = toy_trainer(tmp_path, trainer_class=Broken, max_grad_norm=max_grad_norm, search_scope=scope)
    stops(trainer, r"in the gradient \(its norm is (nan|inf)\) at update 2, before its optimizer step", updates=1)


def test_a_kl_term_that_overflows_stops_before_the_optimizer_step(tmp_path):
    class FarReference(BAPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            output["ref_per_token_logps"] += 100.0  # e^100 is beyond float32
            return output

    toy_model().save_pretrained(tmp_path / "model")  # TRL loads the reference from there
    trainer = toy_trainer(tmp_path, str(tmp_path / "model"), trainer_class=FarReference, beta=0.1)
    stops(trainer, r"NaN or infinity in the gradient .* at update 1", updates=0)


# Ratios


class FarBehavior(BAPOTrainer):
    """Samples whose policy was far away: by `distance` nats a token, in both directions."""

    distance = 20.0

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        signs = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0]).repeat(100)[: len(output["prompt_ids"])]
        output["old_per_token_logps"] -= self.distance * signs.unsqueeze(1)
        return output


def finite_run(trainer, args) -> list[dict]:
    """Train, and see that all is finite and every bound on the grid."""
    trainer.train()
    logs = training_logs(trainer)
    assert len(logs) == args["max_steps"]
    for log in logs:
        assert math.isfinite(log["loss"])
        assert math.isfinite(log["grad_norm"])
        if "bapo/clip_low" in log and args["search_scope"] != "micro_batch":  # else means over micro-batches
            assert min(abs(BoundGrid().lower - log["bapo/clip_low"])) < 1e-9
            assert min(abs(BoundGrid().upper - log["bapo/clip_high"])) < 1e-9
        assert args["negative_weight_min"] <= log["bapo/negative_weight"] <= 1
    assert all(weight.isfinite().all() for weight in trainer.model.parameters())
    return logs


@pytest.mark.parametrize(
    ("loss_type", "level", "scope", "weight"),
    [
        *((loss_type, level, "carried_over", 0.05) for loss_type in LOSS_TYPES for level in ("token", "sequence")),
        ("dapo", "token", "batch", 1.0),
        ("dapo", "sequence", "micro_batch", 0.05),
    ],
)
def test_ratios_of_e_20_leave_loss_gradient_and_bounds_finite(tmp_path, loss_type, level, scope, weight):
    args = {"search_scope": scope, "negative_weight_min": weight, "max_steps": 2}
    settings = {**settings_of(loss_type), "importance_sampling_level": level, **args}
    logs = finite_run(toy_trainer(tmp_path, trainer_class=FarBehavior, **settings), args)
    assert logs[0]["ratio/max"] == pytest.approx(math.exp(20), rel=1e-3)
    assert logs[0]["ratio/min"] == pytest.approx(math.exp(-20), rel=1e-3)


@pytest.mark.parametrize(("loss_type", "scope"), [case for case in LOSSES_AND_SCOPES if case[1] != "micro_batch"])
def test_ratios_beyond_float32_stop_before_the_optimizer_step(tmp_path, loss_type, scope):
    class Beyond(FarBehavior):
        distance = 100.0

    trainer = toy_trainer(tmp_path, trainer_class=Beyond, search_scope=scope, **settings_of(loss_type))
    stops(trainer, r"`importance_ratio` \(\d+ values\) at update 1, before its optimizer step", updates=0)


# Advantages


@pytest.mark.parametrize(("loss_type", "scope"), LOSSES_AND_SCOPES)
def test_updates_without_any_advantage_train_nothing(tmp_path, loss_type, scope):
    args = {"search_scope": scope, "negative_weight_min": 0.05, "max_steps": 2}
    same = lambda completions, **_: [1.0] * len(completions)  # noqa: E731
    trainer = toy_trainer(tmp_path, reward_funcs=same, **settings_of(loss_type), **args)
    before = weights_of(trainer.model)
    logs = finite_run(trainer, args)
    assert all(log["grad_norm"] == 0 for log in logs)
    assert not any("bapo/positive_share" in log for log in logs)
    assert_same_tensors(before, trainer.model.state_dict())
