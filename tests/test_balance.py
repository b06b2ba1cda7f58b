"""The weight of negative tokens, losses without clip bounds, and curves carried over."""

import itertools
import math
import operator
from dataclasses import replace
from functools import reduce
from types import SimpleNamespace

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from bapo_trl import BAPOConfig
from bapo_trl.checkpoints import curves as curves_file
from bapo_trl.checkpoints.curves import CURVES_FILE
from bapo_trl.clip_bounds import Contributions, contributions, search_bounds, size_contributions
from bapo_trl.clip_bounds.controller import ClipBoundController
from bapo_trl.clip_bounds.tokens import policy_tokens
from bapo_trl.errors import InputError
from tests.helpers.alike import assert_same_logs, assert_same_weights
from tests.helpers.toy import CPU, toy_model, toy_run, toy_trainer, training_logs
from tests.test_bapo_trainer import (
    Recorder,
    assert_logged_shares_are_those_of_the_loss,
    expected_bounds,
    share_of,
    spanning,
    trained,
)


UNCLIPPED = {"cispo": {"epsilon_high": 1.1}, "sapo": {}, "vespo": {}}
NINE_LOSSES = {
    **{name: {"loss_type": name} for name in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")},
    **{name: {"loss_type": name, **args} for name, args in UNCLIPPED.items()},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
}


def controller_of(folder, **settings) -> ClipBoundController:
    """The controller of a run on one rank."""
    alone = {"reduce": torch.clone, "gather": torch.clone, "update": lambda: 1}
    return ClipBoundController(BAPOConfig(folder, **CPU, **settings), torch.device("cpu"), **alone)


def observe_token(controller, ratio: float, advantage: float, **tokens):
    """Have a controller see the one token of an update; return its bounds."""
    logps = torch.tensor([[ratio]]).log()
    token = policy_tokens(logps, torch.zeros(1, 1), torch.tensor([advantage]), torch.ones(1, 1))
    token = replace(token, log_probs={"per_token_logps": logps}, **tokens)
    bounds = controller.observe(token, None, is_last=True)
    controller.close()
    return bounds


# The weight


def gradient_by_sign(trainer, record, inputs) -> torch.Tensor:
    """The gradient of TRL's own loss on `inputs`, at the bounds of the record, with respect to the log-probs."""
    logps = record["logps"].clone().requires_grad_()
    saved = trainer.epsilon_low, trainer.epsilon_high
    if trainer.args.has_clip_bounds:
        trainer.epsilon_low, trainer.epsilon_high = 1 - record["bounds"].low, record["bounds"].high - 1
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (logps, torch.zeros_like(logps), None)
    try:
        (gradient,) = torch.autograd.grad(GRPOTrainer._compute_loss(trainer, trainer.model, inputs), logps)
    finally:
        del trainer._get_per_token_logps_and_entropies
        trainer.epsilon_low, trainer.epsilon_high = saved
    return gradient


def assert_negatives_are_scaled(trainer, record, weight: float) -> None:
    """See that a weight scales the gradients of negative tokens of TRL's own loss, and no others."""
    plain = gradient_by_sign(trainer, record, record["inputs"])
    negative = record["inputs"]["advantages"] < 0
    torch.testing.assert_close(record["gradient"][negative], plain[negative] * weight, rtol=1e-5, atol=1e-9)
    assert torch.equal(record["gradient"][~negative], plain[~negative])


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        *((name, "carried_over") for name in NINE_LOSSES),
        *((name, scope) for name in ("bnpo", "gspo", "vespo") for scope in ("batch", "micro_batch")),
    ],
)
def test_the_weight_scales_gradients_of_negative_tokens_alone_and_the_share_is_that_of_the_gradient(
    tmp_path, name, scope
):
    """Through `train()`; beside TRL's own loss on the batch as it was."""
    trainer = trained(
        tmp_path, **NINE_LOSSES[name], negative_weight_min=0.05, positive_contribution_target=0.8, search_scope=scope,
        learning_rate=1e-2, micro_batch_layout="padded",
    )  # fmt: skip
    weights, expected = [], []
    for update in trainer.updates:
        for record in update:
            weight, advantages = record["bounds"].negative_weight.item(), record["inputs"]["advantages"]
            assert_negatives_are_scaled(trainer, record, weight)
            if (advantages < 0).any() and not (advantages < 0).all():
                weights.append(weight)
        searched = [[record] for record in update] if scope == "micro_batch" else [update]
        expected.append(torch.tensor([share_of(records, name) for records in searched]).nanmean().item())
    assert any(0.05 < weight < 1 for weight in weights)
    logged = [log.get("bapo/positive_share", math.nan) for log in training_logs(trainer)]
    assert logged == pytest.approx(expected, rel=1e-5, nan_ok=True)
    assert any(0 < value < 1 for value in logged)
    if name in UNCLIPPED:
        assert not {"bapo/clip_low", "bapo/clip_high", "bapo/search_steps"} & set(training_logs(trainer)[0])


@pytest.mark.parametrize(
    ("name", "scope"), [("dapo", "carried_over"), ("dapo", "batch"), ("cispo", "batch"), ("vespo", "carried_over")]
)
def test_a_target_of_one_is_a_constant_weight_from_the_first_micro_batch_on_without_another_forward(
    tmp_path, name, scope
):
    fixed = {} if name in UNCLIPPED else {"ratio_lower_max": 0.6, "ratio_upper_start": 3.0}
    trainer = trained(
        tmp_path, **NINE_LOSSES[name], **fixed, search_scope=scope, negative_weight_min=0.25,
        positive_contribution_target=1.0, learning_rate=1e-2,
    )  # fmt: skip
    assert trainer.look_ahead_calls == 0
    logs = training_logs(trainer)
    assert {log["bapo/negative_weight"] for log in logs} == {0.25}
    assert not any("bapo/target_met" in log for log in logs)  # which is 0 always, and no reason for a warning
    for update, log in zip(trainer.updates, logs, strict=True):
        for record in update:
            assert_negatives_are_scaled(trainer, record, 0.25)
        assert log["bapo/positive_share"] == pytest.approx(share_of(update, name), rel=1e-4)


def test_a_constant_weight_holds_where_an_update_has_no_negative_tokens(tmp_path):
    controller = controller_of(tmp_path, loss_type="vespo", negative_weight_min=0.25, positive_contribution_target=1.0)
    controller.begin()
    bounds = observe_token(controller, 1.0, 2.0, gradient_size=torch.ones(1, 1))
    assert (bounds.negative_weight.item(), bounds.positive_share.item()) == (0.25, 1.0)


def test_no_weight_is_constant_where_there_are_bounds_to_search_or_no_weights(tmp_path):
    searched = BAPOConfig(tmp_path, **CPU, positive_contribution_target=1.0, negative_weight_min=0.5)
    assert (searched.has_constant_weight, searched.is_adaptive) == (False, True)
    assert not BAPOConfig(tmp_path, **CPU, loss_type="vespo").has_constant_weight


def test_a_constant_weight_has_a_setting_of_its_own(tmp_path):
    config = BAPOConfig(tmp_path, **CPU, loss_type="vespo", negative_weight=0.5)
    assert (config.negative_weight_min, config.positive_contribution_target) == (0.5, 1.0)
    assert config.has_constant_weight
    same = {"negative_weight_min": 0.5, "positive_contribution_target": 1.0}
    assert BAPOConfig(tmp_path, **CPU, loss_type="vespo", negative_weight=0.5, **same).has_constant_weight
    fixed = {"ratio_lower_max": 0.6, "ratio_upper_max": 1.2}
    assert BAPOConfig(tmp_path, **CPU, **fixed, negative_weight=0.5).has_constant_weight


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "but BAPO searches the clip bounds"),
        ({"loss_type": "vespo", "negative_weight_min": 0.05}, "but `negative_weight_min` is 0.05: remove one"),
        (
            {"loss_type": "vespo", "negative_weight_min": 0.5, "positive_contribution_target": 0.8},
            "is 0.8: remove",
        ),
    ],
)
def test_a_constant_weight_beside_a_search_is_an_error(tmp_path, settings, message):
    with pytest.raises(InputError, match=message):
        BAPOConfig(tmp_path, **CPU, **settings, negative_weight=0.5)


@pytest.mark.trainings
@pytest.mark.parametrize("loss_type", UNCLIPPED)
def test_without_a_weight_a_loss_without_bounds_equals_grpo_trainer_bit_for_bit(tmp_path, loss_type):
    settings = {"loss_type": loss_type, "max_steps": 3, **UNCLIPPED[loss_type]}
    grpo = toy_run(tmp_path, trainer_class=GRPOTrainer, config_class=GRPOConfig, **settings)
    bapo = toy_run(tmp_path, micro_batch_layout="padded", **settings)
    assert_same_weights(grpo, bapo)
    assert_same_logs(grpo, bapo)


def test_several_passes_weigh_the_advantages_of_the_buffer_each_time_anew(tmp_path):
    trainer = trained(
        tmp_path, negative_weight_min=0.05, positive_contribution_target=0.9,
        steps_per_generation=2, gradient_accumulation_steps=2, num_iterations=3, learning_rate=1e-2, max_steps=3,
    )  # fmt: skip
    passes = [[record["inputs"]["advantages"] for record in update] for update in trainer.updates]
    assert min(update[0]["bounds"].negative_weight for update in trainer.updates) < 1
    for later in passes[1:]:
        for first, again in zip(passes[0], later, strict=True):
            assert torch.equal(first, again)
            assert again.dim() == 1


# Curves carried over


def bounds_of(trainer) -> list[tuple[float, float, float]]:
    return [
        (log["bapo/clip_low"], log["bapo/clip_high"], log["bapo/negative_weight"]) for log in training_logs(trainer)
    ]


CARRIED = {
    "search_scope": "carried_over", "negative_weight_min": 0.05, "positive_contribution_target": 0.7,
    "gradient_accumulation_steps": 2, "steps_per_generation": 8, "learning_rate": 1e-2, "max_steps": 8,
    "num_iterations": 1,
}  # fmt: skip
ONE_UPDATE = {"steps_per_generation": 2, "max_steps": 4}  # per generation


@pytest.fixture(scope="module")
def carried_run(tmp_path_factory) -> Recorder:
    return trained(tmp_path_factory.mktemp("carried"), **CARRIED)


def test_the_first_update_of_a_generation_is_that_of_the_batch_scope(carried_run, tmp_path):
    """Its ratios are 1: the totals tell all, without a forward pass."""
    batch = trained(tmp_path, **{**CARRIED, "search_scope": "batch"})
    assert carried_run.look_ahead_calls == 0
    assert batch.look_ahead_calls > 0
    assert bounds_of(carried_run)[0] == pytest.approx(bounds_of(batch)[0])
    assert bounds_of(carried_run)[2] != pytest.approx(bounds_of(batch)[2])


class VLLMCorrected(Recorder):
    """Weighs the tokens as vLLM's correction does, of samples with log-probabilities of their own."""

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        logps = output["old_per_token_logps"]
        output["sampling_per_token_logps"] = logps + 0.3 * torch.randn_like(logps)
        output["importance_sampling_ratio"] = 0.25 + torch.rand_like(logps)
        self.use_vllm = False
        return output

    def _compute_loss(self, model, inputs):
        self.use_vllm = True  # the loss and the search read it; generation must not
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self.use_vllm = False


@pytest.mark.trainings
@pytest.mark.parametrize(
    "args", [*NINE_LOSSES.values(), {"off_policy_mask_threshold": 0.05}], ids=[*NINE_LOSSES, "off-policy mask"]
)
def test_vllms_correction_counts_in_the_share_of_each_loss_whatever_the_scope(tmp_path, args):
    """VESPO takes it into its kernel, and the off-policy mask reads the sampler's log-probs: 1 nowhere, even fresh."""
    first = {}
    for scope in ("batch", "carried_over"):
        torch.manual_seed(0)
        settings = {**CARRIED, **args, "search_scope": scope, "max_steps": 2, "micro_batch_layout": "padded"}
        trainer = toy_run(tmp_path / scope, trainer_class=VLLMCorrected, **settings)
        first[scope] = trainer.updates[0][0]["bounds"]
        logged = training_logs(trainer)[0]["bapo/positive_share"]
        assert logged == pytest.approx(share_of(trainer.updates[0], args.get("loss_type")), rel=1e-5)
    for name in ("low", "high", "negative_weight"):
        torch.testing.assert_close(getattr(first["batch"], name), getattr(first["carried_over"], name))


def curves_and_totals(update, args) -> tuple[Contributions, Contributions]:
    """The curves of an update's tokens, and their total absolute advantages."""
    curves, totals = [], []
    for record in update:
        inputs = record["inputs"]
        tokens = policy_tokens(
            record["logps"], inputs["old_per_token_logps"], inputs["advantages"], inputs["completion_mask"],
            weighs_by_length=args.loss_type == "grpo",
        )  # fmt: skip
        curves.append(contributions(tokens.ratio, tokens.advantages, tokens.weights, args.bound_grid))
        totals.append(size_contributions(torch.ones_like(tokens.ratio), tokens.advantages, tokens.weights))
    return reduce(operator.add, curves), reduce(operator.add, totals)


def assert_forecast(before, update, args, count: int | None = None) -> None:
    """See that an update has the bounds of the curves of the one before, scaled to the totals of its first tokens."""
    seen, totals = curves_and_totals(before, args)
    forecast = seen.over(totals, seen) * curves_and_totals(update[:count], args)[1]
    expected = search_bounds(
        forecast, args.bound_grid, args.positive_contribution_target, negative_weight_min=args.negative_weight_min
    )
    for name in ("low", "high", "negative_weight"):
        torch.testing.assert_close(getattr(update[0]["bounds"], name), getattr(expected, name))


def test_later_updates_take_the_curves_of_the_one_before_scaled_to_their_totals(carried_run):
    for generation in (carried_run.updates[:4], carried_run.updates[4:]):
        for before, update in itertools.pairwise(generation):
            assert_forecast(before, update, carried_run.args)
    assert sum(update[0]["bounds"].negative_weight < 1 for update in carried_run.updates) > 2


@pytest.mark.trainings
def test_a_constant_added_to_each_reward_changes_no_bound(tmp_path):
    """It changes no advantage but for rounding, and flat curves do not tell what a bound would clip."""
    highs = []
    for constant in (0.0, 0.1, 5.7):

        def reward(completions, constant=constant, **kwargs):
            return [constant + len(text) % 2 + 0.3 * (len(text) % 3) for text in completions]

        trainer = toy_run(
            tmp_path, loss_type="grpo", steps_per_generation=2, learning_rate=1e-3, max_steps=8, reward_funcs=reward
        )
        logs = training_logs(trainer)
        assert {log["bapo/target_met"] for log in logs} == {1}
        assert any(log["ratio/max"] > 1.01 for log in logs)
        highs.append([log["bapo/clip_high"] for log in logs])
    assert highs[0] == highs[1] == highs[2] == [1.2] * 8


def test_the_curves_of_an_update_that_spans_two_generations_are_over_the_totals_of_both(tmp_path):
    trainer = spanning(tmp_path, positive_contribution_target=0.7, negative_weight_min=0.05)
    known = (3, 3, 2, 3, 3, 1)  # micro-batches that were sampled when the update began
    for before, update, count in zip(trainer.updates[1:], trainer.updates[2:], known[2:], strict=False):
        assert_forecast(before, update, trainer.args, count)
    assert sum(update[0]["bounds"].negative_weight < 1 for update in trainer.updates[2:]) > 1


def test_an_update_on_replayed_samples_takes_the_curves_of_the_one_before(tmp_path):
    trainer = trained(tmp_path, **{**CARRIED, **ONE_UPDATE}, replay_fraction=0.5)
    for before, update in itertools.pairwise(trainer.updates):
        assert_forecast(before, update, trainer.args)
    assert sum(update[0]["bounds"].negative_weight < 1 for update in trainer.updates[1:]) > 1


@pytest.mark.parametrize(
    "args",
    [
        {"model": toy_model(attention_dropout=0.3)},
        {"top_entropy_quantile": 0.5},
        {"replay_fraction": 0.5},
        {"replay_fraction": 0.5, **ONE_UPDATE},
        {"partial_rollout_oversampling": 1.5, "partial_rollout_chunk_length": 3, **ONE_UPDATE},
    ],
    ids=["dropout", "entropy mask", "replay", "replay, one update", "partial rollouts, one update"],
)
def test_carried_curves_need_no_forward_pass_whether_or_not_the_ratios_are_one(tmp_path, args):
    trainer = trained(tmp_path, **{**CARRIED, **args})
    assert trainer.look_ahead_calls == 0
    assert_logged_shares_are_those_of_the_loss(trainer)


@pytest.mark.trainings
@pytest.mark.parametrize(("dropout", "args"), [(0.3, {}), (0.0, {"replay_fraction": 0.5})])
def test_an_update_of_one_micro_batch_is_never_looked_ahead_at(tmp_path, dropout, args):
    """Each is searched over its own tokens: the loss has scored them by then."""
    single = {**CARRIED, "gradient_accumulation_steps": 1, "steps_per_generation": 2, "max_steps": 6}
    trainers = {}
    for scope in ("carried_over", "batch"):
        settings = {**single, "search_scope": scope, **args}
        trainers[scope] = trained(tmp_path / scope, model=toy_model(attention_dropout=dropout), **settings)
    carried, batch = trainers.values()
    assert carried.look_ahead_calls == batch.look_ahead_calls == 0
    assert bounds_of(carried) == bounds_of(batch)
    for update in carried.updates:
        expected = expected_bounds(update, carried.args)
        assert update[0]["bounds"].negative_weight.item() == pytest.approx(expected.negative_weight.item())


def test_whether_the_target_is_met_is_what_the_forecast_says(carried_run):
    """Its updates scatter around the target: half of them would miss it by a hair."""
    logs = training_logs(carried_run)
    assert {log["bapo/target_met"] for log in logs} == {1.0}
    assert any(log["bapo/positive_share"] < CARRIED["positive_contribution_target"] for log in logs)


@pytest.mark.trainings
def test_carried_curves_are_in_the_checkpoint_and_a_resumed_run_goes_on_with_them(tmp_path):
    settings = {**CARRIED, "save_strategy": "steps", "save_steps": 4}
    straight = toy_run(tmp_path / "straight", **settings)
    checkpoint = tmp_path / "straight" / "checkpoint-4"
    assert curves_file.FILES.read(checkpoint / CURVES_FILE)["positive"].max() != 1

    resumed = toy_run(tmp_path / "resumed", **settings, resume=str(checkpoint))
    assert bounds_of(resumed) == bounds_of(straight)
    assert_same_weights(straight, resumed)

    other = toy_trainer(tmp_path / "other", **settings, ratio_upper_start=1.0, ratio_upper_max=2.8)
    with pytest.warns(UserWarning, match="no carried-over curves for these candidate bounds"):
        other.train(resume_from_checkpoint=str(checkpoint))
    (checkpoint / CURVES_FILE).unlink()
    with pytest.warns(UserWarning, match="no carried-over curves"):
        toy_trainer(tmp_path / "removed", **settings).train(resume_from_checkpoint=str(checkpoint))


def test_ranks_go_on_with_the_curves_of_the_first(tmp_path, monkeypatch):
    saved, loaded = controller_of(tmp_path), controller_of(tmp_path)
    saved.begin(Contributions(torch.tensor([2.0]), torch.tensor([0.0])))
    observe_token(saved, 0.75, 2.0)
    # This rank reads no file: it gets what the main process has read
    monkeypatch.setattr("bapo_trl.checkpoints.curves.on_main_process", lambda read: saved.state_dict())
    part = curves_file.CarriedCurves()
    part.reset(SimpleNamespace(bounds_controller=loaded))
    part.load_together(tmp_path)
    for sign in ("positive", "negative"):
        torch.testing.assert_close(loaded.state_dict()[sign], saved.state_dict()[sign])
    assert not torch.equal(loaded.state_dict()["positive"], controller_of(tmp_path).state_dict()["positive"])


def test_a_sign_without_a_total_keeps_its_curve(tmp_path):
    controller = controller_of(tmp_path, ratio_lower_max=0.6, ratio_upper_max=1.2, negative_weight_min=0.05)

    def learned(ratio: float, advantage: float) -> list[float]:
        """The curves after an update of one token: of each sign, the latest ratio that the bounds let through."""
        controller.begin(Contributions(torch.tensor([max(advantage, 0.0)]), torch.tensor([max(-advantage, 0.0)])))
        observe_token(controller, ratio, advantage)
        return [controller.state_dict()[sign].item() for sign in ("positive", "negative")]

    assert learned(0.75, 2.0) == pytest.approx([0.75, 1.0])
    assert learned(1.5, -4.0) == pytest.approx([0.75, 1.5])
    assert learned(0.5, 1.0) == pytest.approx([0.5, 1.5])
