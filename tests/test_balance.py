"""The weight of negative tokens, losses without clip bounds, and curves carried over."""

import itertools
import math

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from bapo_trl import BAPOConfig
from bapo_trl.checkpoints import curves as curves_file
from bapo_trl.checkpoints.curves import CURVES_FILE
from bapo_trl.clip_bounds import BoundGrid, Contributions, contributions, search_bounds
from bapo_trl.clip_bounds.carried_curves import CarriedCurves
from bapo_trl.clip_bounds.tokens import policy_tokens
from tests.helpers.alike import assert_same_logs, assert_same_weights
from tests.helpers.toy import CPU, toy_model, toy_run, toy_trainer, training_logs
from tests.test_bapo_trainer import Recorder, VLLMCorrected, expected_bounds, trained


UNCLIPPED = {"cispo": {"epsilon_high": 1.1}, "sapo": {}, "vespo": {}}
NINE_LOSSES = {
    **{name: {"loss_type": name} for name in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")},
    **{name: {"loss_type": name, **args} for name, args in UNCLIPPED.items()},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
}
GRID = BoundGrid(lower_start=0.5, lower_max=0.5, upper_start=1.0, upper_max=1.0)


def curves(positive: float, negative: float) -> Contributions:
    return Contributions(torch.tensor([positive]), torch.tensor([negative]))


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


SIGNS = (lambda advantages: advantages > 0, lambda advantages: advantages < 0)


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
        learning_rate=1e-2,
    )  # fmt: skip
    weights, expected = [], []
    for update in trainer.updates:
        for record in update:
            plain = gradient_by_sign(trainer, record, record["inputs"])
            negative = record["inputs"]["advantages"] < 0
            weight = record["bounds"].negative_weight.item()
            torch.testing.assert_close(record["gradient"][negative], plain[negative] * weight, rtol=1e-5, atol=1e-9)
            assert torch.equal(record["gradient"][~negative], plain[~negative])
            if negative.any() and not negative.all():
                weights.append(weight)
        sizes = [
            [record["gradient"].double().abs()[sign(record["inputs"]["advantages"])].sum() for sign in SIGNS]
            for record in update
        ]
        if name == "bnpo":  # the search takes the update as one batch
            sizes = [
                [size * record["inputs"]["completion_mask"].sum() for size in pair]
                for pair, record in zip(sizes, update, strict=True)
            ]
        parts = [[pair] for pair in sizes] if scope == "micro_batch" else [sizes]
        shares = [
            (positive / (positive + negative)).item()
            for positive, negative in (map(sum, zip(*part, strict=True)) for part in parts)
        ]
        shares = [value for value in shares if not math.isnan(value)]
        expected.append(sum(shares) / len(shares) if shares else None)
    assert any(0.05 < weight < 1 for weight in weights)
    logged = [log.get("bapo/positive_share") for log in training_logs(trainer)]
    assert logged == [value if value is None else pytest.approx(value, rel=1e-5) for value in expected]
    assert any(value is not None and 0 < value < 1 for value in logged)
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
        sizes = [[0.0, 0.0]]
        for record in update:
            plain = gradient_by_sign(trainer, record, record["inputs"])
            negative = record["inputs"]["advantages"] < 0
            torch.testing.assert_close(record["gradient"][negative], plain[negative] * 0.25, rtol=1e-5, atol=1e-9)
            assert torch.equal(record["gradient"][~negative], plain[~negative])
            sizes.append([record["gradient"].abs()[rows].sum().item() for rows in (~negative, negative)])
        positive, negative = map(sum, zip(*sizes, strict=True))
        assert log["bapo/positive_share"] == pytest.approx(positive / (positive + negative), rel=1e-4)


def test_a_constant_weight_holds_where_an_update_has_no_negative_tokens(tmp_path):
    trainer = toy_trainer(
        tmp_path, loss_type="vespo", negative_weight_min=0.25, positive_contribution_target=1.0, scale_rewards="none",
    )  # fmt: skip
    curves_of_positives = Contributions(torch.tensor([2.0]), torch.tensor([0.0]))
    bounds = trainer._bounds._search(curves_of_positives)
    assert (bounds.negative_weight.item(), bounds.positive_share.item()) == (0.25, 1.0)


def test_no_weight_is_constant_where_there_are_bounds_to_search_or_no_weights(tmp_path):
    searched = BAPOConfig(tmp_path, **CPU, positive_contribution_target=1.0, negative_weight_min=0.5)
    assert (searched.has_constant_weight, searched.is_adaptive) == (False, True)
    assert not BAPOConfig(tmp_path, **CPU, loss_type="vespo").has_constant_weight


@pytest.mark.parametrize("loss_type", UNCLIPPED)
def test_without_a_weight_a_loss_without_bounds_equals_grpo_trainer_bit_for_bit(tmp_path, loss_type):
    settings = {"loss_type": loss_type, "max_steps": 3, **UNCLIPPED[loss_type]}
    grpo = toy_run(tmp_path, trainer_class=GRPOTrainer, config_class=GRPOConfig, **settings)
    bapo = toy_run(tmp_path, **settings)
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


def test_the_covariance_counts_the_weight_and_the_size_of_a_gradient_without_bounds(tmp_path):
    trainer = trained(
        tmp_path, loss_type="cispo", epsilon_high=5.0, negative_weight_min=0.25, positive_contribution_target=1.0,
        learning_rate=2e-2, gradient_accumulation_steps=1, steps_per_generation=2,
    )  # fmt: skip
    covariances = []
    for (record,) in trainer.updates:
        passes = record["gradient"] != 0
        logps = record["logps"][passes]
        advantages = -record["gradient"][passes] * record["inputs"]["num_items_in_batch"] / 2  # of two micro-batches
        covariances.append(((logps - logps.mean()) * advantages).mean().item())
    logged = [log["bapo/entropy_covariance"] for log in training_logs(trainer)]
    assert logged == pytest.approx(covariances, rel=1e-3)
    assert any(covariances)


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


@pytest.fixture(scope="module")
def carried_run(tmp_path_factory) -> Recorder:
    return trained(tmp_path_factory.mktemp("carried"), **CARRIED)


def test_the_first_update_of_a_generation_is_that_of_the_batch_scope(carried_run, tmp_path):
    """Its ratios are 1: the masses tell all, without a forward pass."""
    batch = trained(tmp_path, **{**CARRIED, "search_scope": "batch"})
    assert carried_run.look_ahead_calls == 0
    assert batch.look_ahead_calls > 0
    assert bounds_of(carried_run)[0] == pytest.approx(bounds_of(batch)[0])
    assert bounds_of(carried_run)[2] != pytest.approx(bounds_of(batch)[2])


@pytest.mark.trainings
@pytest.mark.parametrize(
    "args", [*NINE_LOSSES.values(), {"off_policy_mask_threshold": 0.05}], ids=[*NINE_LOSSES, "off-policy mask"]
)
def test_vllms_correction_counts_in_the_share_of_each_loss_whatever_the_scope(tmp_path, args):
    """VESPO takes it into its kernel, and the off-policy mask reads the sampler's log-probs: 1 nowhere, even fresh."""
    first = {}
    for scope in ("batch", "carried_over"):
        torch.manual_seed(0)
        trainer = toy_run(
            tmp_path / scope, trainer_class=VLLMCorrected, **{**CARRIED, **args, "search_scope": scope, "max_steps": 2}
        )
        first[scope] = trainer.updates[0][0]["bounds"]
        sizes = torch.zeros(2, dtype=torch.float64)
        for record in trainer.updates[0]:
            factor = record["inputs"]["completion_mask"].sum() if args.get("loss_type") == "bnpo" else 1
            gradient = record["gradient"].double().abs() * factor
            sizes += torch.stack([gradient[sign(record["inputs"]["advantages"])].sum() for sign in SIGNS])
        logged = training_logs(trainer)[0]["bapo/positive_share"]
        assert logged == pytest.approx((sizes[0] / sizes.sum()).item(), rel=1e-5)
    for name in ("low", "high", "negative_weight"):
        torch.testing.assert_close(getattr(first["batch"], name), getattr(first["carried_over"], name))


def test_later_updates_take_the_curves_of_the_one_before_scaled_to_their_masses(carried_run):
    grid, target = carried_run.args.bound_grid, carried_run.args.positive_contribution_target

    def tokens_of(update):
        logps, old, advantages, mask = (
            torch.cat([record["inputs"][key] if key in record["inputs"] else record[key] for record in update])
            for key in ("logps", "old_per_token_logps", "advantages", "completion_mask")
        )
        return policy_tokens(logps, old, advantages, mask)

    def masses_of(updates):
        sums = [(tokens.weights * tokens.advantages.unsqueeze(1)).double() for tokens in map(tokens_of, updates)]
        positive = sum(part.clamp(min=0).sum() for part in sums)
        return Contributions(positive, positive - sum(part.sum() for part in sums))

    moved = 0
    for generation in (carried_run.updates[:4], carried_run.updates[4:]):
        for before, update in itertools.pairwise(generation):
            tokens = tokens_of(before)
            seen = contributions(tokens.ratio, tokens.advantages, tokens.weights, grid)
            carried = CarriedCurves(grid, tokens.ratio.device)
            carried.learn(seen, masses_of([before]))
            scaled = carried.scaled_to(masses_of([update]))
            expected = search_bounds(scaled, grid, target, negative_weight_min=0.05)
            bounds = update[0]["bounds"]
            found = [bounds.low, bounds.high, bounds.negative_weight]
            torch.testing.assert_close(found, [expected.low, expected.high, expected.negative_weight])
            moved += int(bounds.negative_weight < 1)
    assert moved > 2


@pytest.mark.parametrize(
    ("args", "generations"),
    [
        ({"model": toy_model(attention_dropout=0.3)}, 2),
        ({"top_entropy_quantile": 0.5}, 2),
        ({"replay_fraction": 0.5}, 1),  # the first fills the queue
    ],
)
def test_a_generation_whose_ratios_are_not_one_for_sure_is_looked_ahead_at_once(tmp_path, args, generations):
    trainer = trained(tmp_path, **CARRIED, **args)
    assert trainer.look_ahead_calls == 2 * generations  # its first update, of two micro-batches


@pytest.mark.parametrize(("dropout", "args"), [(0.3, {}), (0.0, {"replay_fraction": 0.5})])
def test_an_update_of_one_micro_batch_is_never_looked_ahead_at(tmp_path, dropout, args):
    """The first on samples is searched over its own tokens: the loss has scored them by then."""
    single = {**CARRIED, "gradient_accumulation_steps": 1, "steps_per_generation": 2, "max_steps": 6}
    trainers = {}
    for scope in ("carried_over", "batch"):
        settings = {**single, "search_scope": scope, **args}
        trainers[scope] = trained(tmp_path / scope, model=toy_model(attention_dropout=dropout), **settings)
    carried, batch = trainers.values()
    assert carried.look_ahead_calls == batch.look_ahead_calls == 0
    assert bounds_of(carried)[0] == bounds_of(batch)[0]
    assert bounds_of(carried)[1] != bounds_of(batch)[1]
    for update in carried.updates[::2]:
        expected = expected_bounds(update, carried.args)
        assert update[0]["bounds"].negative_weight.item() == pytest.approx(expected.negative_weight.item())


def test_whether_the_target_is_met_is_what_the_forecast_says(carried_run):
    """Its updates scatter around the target: half of them would miss it by a hair."""
    logs = training_logs(carried_run)
    assert {log["bapo/target_met"] for log in logs} == {1.0}
    assert any(log["bapo/positive_share"] < CARRIED["positive_contribution_target"] for log in logs)


def test_carried_curves_are_in_the_checkpoint_and_a_resumed_run_goes_on_with_them(tmp_path):
    settings = {**CARRIED, "save_strategy": "steps", "save_steps": 4}
    straight = toy_run(tmp_path / "straight", **settings)
    checkpoint = tmp_path / "straight" / "checkpoint-4"
    saved = CarriedCurves(straight.args.bound_grid, torch.device("cpu"))
    assert saved.load_state_dict(curves_file.FILES.read(checkpoint / CURVES_FILE))
    assert saved.state_dict()["positive"].max() != 1

    resumed = toy_run(tmp_path / "resumed", **settings, resume=str(checkpoint))
    assert bounds_of(resumed) == bounds_of(straight)
    assert_same_weights(straight, resumed)

    for name, bounds in {
        "fewer": {"ratio_upper_max": 2.0},
        "others": {"ratio_upper_start": 1.0, "ratio_upper_max": 2.8},
    }.items():
        other = toy_trainer(tmp_path / name, **settings, **bounds)
        with pytest.warns(UserWarning, match="no carried curves on these candidate bounds"):
            other.train(resume_from_checkpoint=str(checkpoint))
    file = checkpoint / CURVES_FILE
    file.write_bytes(b"no curves")
    with pytest.raises(ValueError, match=r"carried curves .* is damaged"):
        toy_trainer(tmp_path / "damaged", **settings).train(resume_from_checkpoint=str(checkpoint))
    file.unlink()  # as the message says
    with pytest.warns(UserWarning, match="no carried curves"):
        toy_trainer(tmp_path / "removed", **settings).train(resume_from_checkpoint=str(checkpoint))


def test_ranks_go_on_with_the_curves_of_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr("bapo_trl.checkpoints.curves.broadcast", lambda vector: 2 * vector)
    trainer = toy_run(tmp_path, **{**CARRIED, "save_strategy": "steps", "save_steps": 4, "max_steps": 4})
    saved = trainer._bounds.state_dict()
    curves_file.load_curves(trainer._bounds, tmp_path / "checkpoint-4", trainer.accelerator)
    for sign in ("positive", "negative"):
        torch.testing.assert_close(trainer._bounds.state_dict()[sign], 2 * saved[sign])


def test_a_sign_without_mass_keeps_its_curve():
    carried = CarriedCurves(GRID, torch.device("cpu"))
    carried.learn(curves(3.0, 0.5), curves(2.0, 1.0))
    carried.learn(curves(0.0, 0.25), curves(0.0, 1.0))
    scaled = carried.scaled_to(curves(4.0, 8.0))
    assert (scaled.positive.item(), scaled.negative.item()) == (6.0, 2.0)
    carried.learn(curves(2.0, 0.0), curves(1.0, 0.0))
    scaled = carried.scaled_to(curves(4.0, 8.0))
    assert (scaled.positive.item(), scaled.negative.item()) == (8.0, 2.0)
