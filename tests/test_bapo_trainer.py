"""The trainer through `train()`: which bounds it chooses, what it logs, what it rejects."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerCallback

from bapo_trl import BAPOConfig, BAPOTrainer
from bapo_trl.batch.reward_sums import best_of_k
from bapo_trl.clip_bounds import SCOPES, contributions, search_bounds
from bapo_trl.clip_bounds.update_log import UPDATE_METRICS
from bapo_trl.tasks import character_tokenizer
from tests.helpers.alike import TIMES
from tests.helpers.commands import succeeded
from tests.helpers.forked import run_function
from tests.helpers.ranks import finish, read_ranks
from tests.helpers.toy import (
    InUpdate,
    digits_reward,
    toy_dataset,
    toy_model,
    toy_run,
    toy_trainer,
    training_logs,
)


AHEAD = ["batch", "carried_over"]  # the scopes that choose bounds before an update


class Recorder(BAPOTrainer):
    """Keeps, for each micro-batch, what the loss saw: its batch, log-probs, token losses' gradient, bounds."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.updates = [[]]
        self.look_ahead_calls = 0

    def _compute_loss(self, model, inputs):
        self._record = {"inputs": inputs}
        loss = super()._compute_loss(model, inputs)
        logps = self._record["logps"]
        (gradient,) = torch.autograd.grad(loss, logps, retain_graph=True)
        self._record.update(gradient=gradient, bounds=self.clip_bounds, logps=logps.detach())
        self.updates[-1].append(self._record)
        if self.accelerator.sync_gradients:
            self.updates.append([])
        return loss

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        output = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        if output[0].requires_grad:
            self._record["logps"] = output[0]
        elif self._loss_inputs is None and self.model.training and not self._generating:
            self.look_ahead_calls += 1
        return output

    _generating = False

    def _generate_and_score_completions(self, inputs):
        self._generating = True
        try:
            return super()._generate_and_score_completions(inputs)
        finally:
            self._generating = False


def trained(tmp_path, trainer_class=Recorder, **args) -> Recorder:
    trainer = toy_run(tmp_path, trainer_class=trainer_class, **args)
    trainer.updates.pop()  # opened after the last update
    return trainer


def expected_bounds(records, args):
    """Search over the concatenated tokens of the records, weights written out from the definition."""
    curves = []
    for record in records:
        inputs = record["inputs"]
        mask = inputs["completion_mask"].float()
        old = inputs.get("old_per_token_logps", record["logps"])
        log_ratio = record["logps"] - old
        if args.importance_sampling_level == "sequence":
            log_ratio = ((log_ratio * mask).sum(1) / mask.sum(1).clamp(min=1)).unsqueeze(1).expand_as(mask)
        weights = mask / mask.sum(1, keepdim=True).clamp(min=1) if args.loss_type == "grpo" else mask
        if args.contribution_weighting == "behavior_prob":
            weights = weights * old.exp()
        curves.append((log_ratio.exp(), inputs["advantages"].unsqueeze(1).expand_as(mask), weights))
    ratio, advantages, weights = (
        torch.cat([part.reshape(-1) for part in parts]).unsqueeze(0) for parts in zip(*curves, strict=True)
    )
    return search_bounds(
        contributions(ratio, advantages, weights, args.bound_grid, args.contribution_measure, args.delta),
        args.bound_grid,
        args.positive_contribution_target,
        args.search_order,
        args.negative_weight_min,
    )


def assert_same_bounds(bounds, expected):
    assert bounds.low.item() == expected.low.item()
    assert bounds.high.item() == expected.high.item()
    assert bounds.steps.item() == expected.steps.item()
    torch.testing.assert_close(bounds.positive_share, expected.positive_share, rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("measure", "order", "weighting"),  # every pair of values
    [
        ("gradient", "upper_first", "uniform"),
        ("gradient", "lower_first", "behavior_prob"),
        ("surrogate", "upper_first", "behavior_prob"),
        ("surrogate", "lower_first", "uniform"),
    ],
)
def test_batch_scope_searches_over_all_micro_batches_of_the_update(tmp_path, measure, order, weighting):
    trainer = trained(
        tmp_path, contribution_measure=measure, search_order=order, contribution_weighting=weighting,
        positive_contribution_target=0.55, search_scope="batch",
    )  # fmt: skip
    assert [len(update) for update in trainer.updates] == [2] * 4
    moved = 0
    for update in trainer.updates:
        assert update[0]["bounds"] is update[1]["bounds"]
        expected = expected_bounds(update, trainer.args)
        assert_same_bounds(update[0]["bounds"], expected)
        moved += expected.steps.item() > 0
    assert moved > 0  # otherwise this shows nothing


def share_of(records, loss_type: str | None = None) -> float:
    """The share of the positive tokens in the size of the gradient of the actual loss; NaN if it is 0."""
    sizes = torch.zeros(2, dtype=torch.float64)
    for record in records:
        # The search takes the update of bnpo as one batch
        factor = record["inputs"]["completion_mask"].sum().item() if loss_type == "bnpo" else 1
        gradient, advantages = record["gradient"].double().abs().cpu() * factor, record["inputs"]["advantages"].cpu()
        sizes += torch.stack([gradient[advantages > 0].sum(), gradient[advantages < 0].sum()])
    return (sizes[0] / sizes.sum()).item()


def assert_logged_shares_are_those_of_the_loss(trainer):
    shares = [share_of(update) for update in trainer.updates]
    assert any(0 < share < 1 for share in shares)
    logged = [update[-1]["bounds"].positive_share.item() for update in trainer.updates]
    assert logged == pytest.approx(shares, rel=1e-5, nan_ok=True)


@pytest.mark.parametrize("scope", AHEAD)
@pytest.mark.parametrize(
    "args",
    [
        {"delta": 1.3, "ratio_upper_max": 1.25, "learning_rate": 5e-2},
        {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "num_iterations": 4},
    ],
    ids=lambda args: "-".join(args),
)
def test_the_logged_share_is_that_of_the_actual_loss(tmp_path, scope, args):
    """More in test_sweep."""
    trainer = trained(tmp_path, search_scope=scope, **args)
    if "delta" in args:
        negative_ratios = [
            (record["logps"] - record["inputs"]["old_per_token_logps"]).exp()[record["inputs"]["advantages"] < 0]
            for update in trainer.updates
            for record in update
        ]
        assert torch.cat([ratios.flatten() for ratios in negative_ratios]).max() > args["delta"]
    assert_logged_shares_are_those_of_the_loss(trainer)


def test_behaviour_probabilities_weigh_on_policy_samples_too(tmp_path):
    settings = {"steps_per_generation": 2, "num_iterations": 1, "max_steps": 3, "search_scope": "batch"}
    trainer = trained(tmp_path, contribution_weighting="behavior_prob", **settings)
    for update in trainer.updates:
        assert "old_per_token_logps" not in update[0]["inputs"]
        assert_same_bounds(update[0]["bounds"], expected_bounds(update, trainer.args))


def test_off_policy_mask_reads_the_log_probs_of_a_rollout_func(tmp_path):
    """One update a generation: all samples are fresh, and TRL computes no log-probabilities before the loss."""
    random = torch.Generator().manual_seed(0)

    def rollout(prompts, trainer):
        completions = [torch.randint(2, 12, (4 + i % 4,), generator=random).tolist() for i in range(len(prompts))]
        logprobs = [(-5 + 2 * torch.randn(len(ids), generator=random)).tolist() for ids in completions]
        prompt_ids = trainer.processing_class(prompts)["input_ids"]
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": logprobs}

    trainer = trained(
        tmp_path, trainer_args={"rollout_func": rollout}, steps_per_generation=2, num_iterations=1,
        off_policy_mask_threshold=0.0,
    )  # fmt: skip
    assert "old_per_token_logps" not in trainer.updates[0][0]["inputs"]
    assert_logged_shares_are_those_of_the_loss(trainer)


@pytest.mark.trainings
def test_the_loss_of_a_batch_of_ones_own_needs_no_buffer(tmp_path):
    trainer = toy_run(tmp_path, max_steps=1)
    batch, trainer._buffered_inputs = trainer._buffered_inputs[0], None
    trainer.model.train()
    assert trainer.compute_loss(trainer.model, batch).isfinite()


@pytest.mark.trainings
def test_a_second_call_to_train_starts_over(tmp_path):
    trainer = trained(tmp_path, max_steps=2)
    trainer.updates = [[]]
    trainer.train()
    trainer.updates.pop()
    assert_logged_shares_are_those_of_the_loss(trainer)
    assert [log["staleness/max"] for log in training_logs(trainer)] == [0, 1]
    # The same tokens in other batches differ by roundings
    assert training_logs(trainer)[0]["ratio/max"] == pytest.approx(1, abs=1e-5)


class Interrupted(TrainerCallback):
    """Raises between the two micro-batches of an update, once."""

    def __init__(self, update):
        self.update = update

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == self.update:
            self.update = None
            raise KeyboardInterrupt


@pytest.mark.trainings
def test_a_run_after_an_aborted_one_is_that_of_a_new_trainer(tmp_path):
    """Frozen weights: what differs would come from the run before."""
    settings = {
        "learning_rate": 0.0, "use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 9.0,
        "entropy_coef_delta": 0.1, "logging_steps": 2, "vllm_logp_tolerance": None,
    }  # fmt: skip
    new = toy_trainer(tmp_path, **settings)
    again = toy_trainer(tmp_path, **settings, trainer_args={"callbacks": [Interrupted(update=3)]})
    with pytest.raises(KeyboardInterrupt):
        again.train()
    for trainer in (new, again):
        torch.manual_seed(1)
        trainer.train()
    for one, other in zip(training_logs(new), training_logs(again), strict=True):
        assert {name: one[name] for name in one.keys() - TIMES} == {name: other[name] for name in other.keys() - TIMES}
    assert new.entropy_coef == again.entropy_coef > 0.1


@pytest.mark.trainings
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss_type", "sapo"),
        ("importance_sampling_level", "sequence"),
        ("epsilon", 0.3),
        ("epsilon_high", 0.3),
        ("beta", 0.1),
        ("off_policy_mask_threshold", 0.5),
        ("top_entropy_quantile", 0.2),
        ("num_iterations", 1),
        ("temperature", 0.7),
    ],
)
def test_a_setting_that_trl_copied_into_the_trainer_is_rejected_by_name_where_it_changes_afterwards(
    tmp_path, name, value
):
    """TRL would train with the old value, and the search would follow the new one."""
    trainer = toy_trainer(tmp_path, max_steps=1)
    old = getattr(trainer.args, name)
    setattr(trainer.args, name, value)
    message = f"`{name}` was changed from {old!r} to {value!r} after the trainer was created.*before you create"
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert trainer.state.global_step == 0
    setattr(trainer.args, name, old)
    trainer.train()


def saved_model(tmp_path) -> str:
    path = tmp_path / "start"
    toy_model().save_pretrained(path)
    character_tokenizer().save_pretrained(path)
    return str(path)


def test_micro_batch_scope_searches_each_micro_batch_without_another_forward(tmp_path):
    trainer = trained(tmp_path, search_scope="micro_batch")
    assert trainer.look_ahead_calls == 0
    bounds = []
    for update, log in zip(trainer.updates, training_logs(trainer), strict=True):
        for record in update:
            assert_same_bounds(record["bounds"], expected_bounds([record], trainer.args))
            bounds.append((record["bounds"].low.item(), record["bounds"].high.item()))
        highs = [record["bounds"].high.item() for record in update]
        assert log["bapo/clip_high"] == pytest.approx(sum(highs) / 2)  # the mean, not the last
    assert len(set(bounds)) > 1


def test_a_fixed_grid_needs_no_look_ahead_and_still_logs_the_share_of_the_whole_update(tmp_path):
    fixed = {"ratio_lower_start": 0.8, "ratio_lower_max": 0.8, "ratio_upper_start": 1.2, "ratio_upper_max": 1.2}
    trainer = trained(tmp_path, **fixed)
    assert trainer.look_ahead_calls == 0
    for update, log in zip(trainer.updates, training_logs(trainer), strict=True):
        share = expected_bounds(update, trainer.args).positive_share.item()
        assert log["bapo/positive_share"] == pytest.approx(share, rel=1e-5)


class ShortLastWindow(Recorder):
    """An epoch of 6 micro-batches with 4 an update: the last window has 2."""

    def get_train_dataloader(self):
        return list(super().get_train_dataloader())[:6]


def test_a_short_last_window_is_searched_over_its_own_micro_batches(tmp_path):
    args = {"gradient_accumulation_steps": 4, "num_iterations": 2, "max_steps": -1, "num_train_epochs": 1}
    trainer = trained(tmp_path, ShortLastWindow, search_scope="batch", **args)
    assert [len(update) for update in trainer.updates] == [4, 2]
    for update in trainer.updates:
        assert_same_bounds(update[0]["bounds"], expected_bounds(update, trainer.args))


def spanning(tmp_path, **args) -> Recorder:
    """Train 6 updates of 3 micro-batches on generations of 8, in two passes: the third and the sixth span two."""
    return trained(tmp_path, gradient_accumulation_steps=3, max_steps=6, loss_type="grpo", **args)


@pytest.mark.parametrize("scope", SCOPES)
def test_an_update_that_spans_two_generations_has_the_bounds_of_its_tokens_of_the_first(tmp_path, scope):
    trainer = spanning(tmp_path, search_scope=scope, positive_contribution_target=0.7, negative_weight_min=0.05)
    assert [len(update) for update in trainer.updates] == [3] * 6
    # All but the first update, of fresh samples; the third has 2 micro-batches of the first generation, the sixth 1
    assert trainer.look_ahead_calls == (3 + 2 + 3 + 3 + 1 if scope == "batch" else 0)
    logs = training_logs(trainer)
    for update, log, known in zip(trainer.updates, logs, (3, 3, 2, 3, 3, 1), strict=True):
        if scope != "micro_batch":
            assert len({record["bounds"].negative_weight.item() for record in update}) == 1
            assert log["bapo/positive_share"] == pytest.approx(share_of(update), rel=1e-5)
        if scope == "batch":
            expected = expected_bounds(update[:known], trainer.args)
            for name in ("low", "high", "negative_weight", "target_met"):
                torch.testing.assert_close(
                    getattr(update[-1]["bounds"], name), getattr(expected, name), rtol=1e-5, atol=0
                )
    assert sum(log["bapo/negative_weight"] < 1 for log in logs) > 2


@pytest.mark.parametrize("scope", AHEAD)
def test_an_update_of_two_whole_generations_is_on_policy(tmp_path, scope):
    settings = {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "num_iterations": 1, "max_steps": 2}
    trainer = trained(tmp_path, search_scope=scope, loss_type="grpo", negative_weight_min=0.05, **settings)
    assert trainer.look_ahead_calls == 0
    assert_logged_shares_are_those_of_the_loss(trainer)
    assert {log["ratio/max"] for log in training_logs(trainer)} == {1}


def run_spanning_on_a_rank(folder: str) -> None:
    finish(spanning(folder, negative_weight_min=0.05, positive_contribution_target=0.7), folder)


@pytest.mark.processes
def test_ranks_agree_in_an_update_that_spans_two_generations(tmp_path):
    succeeded(run_function(run_spanning_on_a_rank, tmp_path, ranks=2))
    one, other = (
        [[log[f"bapo/{name}"] for name in ("clip_high", "negative_weight", "positive_share")] for log in rank["logs"]]
        for rank in read_ranks(tmp_path)
    )
    assert one == other
    assert len(one) == 6


@pytest.mark.parametrize(
    ("settings", "upper"),
    [
        ({"delta": 1.5}, (1.2, 1.5)),
        ({"delta": 1.1}, (1.1, 1.1)),
        ({"delta": 1.5, "ratio_upper_start": 1.25, "ratio_upper_max": 1.25}, (1.25, 1.25)),  # none above `delta`
    ],
)
def test_no_upper_bound_is_above_delta(tmp_path, recwarn, settings, upper):
    trainer = trained(tmp_path, **settings, positive_contribution_target=0.9, learning_rate=5e-2, search_scope="batch")
    highs = [log["bapo/clip_high"] for log in training_logs(trainer)]
    assert (min(highs), max(highs)) == pytest.approx(upper)
    assert_logged_shares_are_those_of_the_loss(trainer)
    warned = [str(warning.message) for warning in recwarn if "`delta` is" in str(warning.message)]
    assert len(warned) == ("ratio_upper_max" not in settings)


# Logs


def test_every_metric_is_logged_at_every_update_and_agrees_with_its_definition(tmp_path):
    trainer = trained(tmp_path, skip_zero_advantage=False)
    logs = training_logs(trainer)
    assert len(logs) == 4
    for age, (update, log) in enumerate(zip(trainer.updates, logs, strict=True)):
        assert set(UPDATE_METRICS) <= set(log)
        bounds = update[-1]["bounds"]
        searched = {
            "clip_low": bounds.low, "clip_high": bounds.high, "positive_share": bounds.positive_share,
            "positive_share_initial": bounds.initial_positive_share, "target_met": bounds.target_met,
            "search_steps": bounds.steps,
        }  # fmt: skip
        for name, value in searched.items():
            assert log[f"bapo/{name}"] == value.item(), name
        ratios, clipped = [], []
        for record in update:
            inputs, mask = record["inputs"], record["inputs"]["completion_mask"].bool()
            of_record = (record["logps"] - inputs["old_per_token_logps"]).exp()
            is_positive = inputs["advantages"].unsqueeze(1) > 0
            is_negative = inputs["advantages"].unsqueeze(1) < 0
            is_clipped = (of_record < bounds.low) & is_negative | (of_record > bounds.high) & is_positive
            ratios.append(of_record[mask])
            clipped += is_clipped[mask].tolist()
        ratio = torch.cat(ratios).double()
        assert log["ratio/mean"] == pytest.approx(ratio.mean().item(), rel=1e-6)
        assert log["ratio/min"] == pytest.approx(ratio.min().item(), rel=1e-6)
        assert log["ratio/max"] == pytest.approx(ratio.max().item(), rel=1e-6)
        assert log["ratio/ess"] == pytest.approx((ratio.sum() ** 2 / (ratio**2).sum() / len(ratio)).item(), rel=1e-6)
        assert log["ratio/kl"] == pytest.approx((ratio - 1 - ratio.log()).mean().item(), rel=1e-4, abs=1e-7)
        assert log["ratio/chi2"] == pytest.approx((ratio**2 - 1).mean().item(), rel=1e-4, abs=1e-6)
        assert 0 < log["ratio/ess"] <= 1 + 1e-9
        assert (log["staleness/mean"], log["staleness/max"]) == (age, age)
        assert log["clip_ratio/region_mean"] == pytest.approx(sum(clipped) / len(clipped), rel=1e-5)
    assert logs[-1]["ratio/max"] > 1.2  # off-policy enough to mean something


@pytest.mark.parametrize("scope", SCOPES)
def test_without_advantages_the_share_and_its_target_are_missing(tmp_path, scope):
    trainer = toy_run(
        tmp_path, search_scope=scope, reward_funcs=lambda completions, **kwargs: [1.0] * len(completions)
    )
    for log in training_logs(trainer):
        assert not {"bapo/positive_share", "bapo/target_met"} & log.keys()
        assert (log["bapo/clip_low"], log["bapo/clip_high"], log["bapo/search_steps"]) == (0.6, 1.2, 0)


def test_clip_bounds_are_the_start_bounds_before_and_the_latest_after_training(tmp_path):
    trainer = toy_trainer(tmp_path)
    assert (trainer.clip_bounds.low, trainer.clip_bounds.high) == (0.6, 1.2)
    assert trainer.clip_bounds.positive_share.isnan()
    trainer.train()
    assert trainer.clip_bounds.high.item() == training_logs(trainer)[-1]["bapo/clip_high"]
    assert 1 + trainer.epsilon_high == trainer.clip_bounds.high


# What a TRL user does with a trainer


def test_evaluation_logs_mean_and_best_of_k_and_leaves_bounds_and_search_alone(tmp_path):
    rewards = []

    def counting_reward(completions, **kwargs):
        values = digits_reward(completions)
        rewards.append(values)
        return values

    sizes = {"per_device_eval_batch_size": 8, "num_generations_eval": 4}
    parts = {"eval_dataset": toy_dataset(6)}
    trainer = toy_run(tmp_path, reward_funcs=counting_reward, trainer_args=parts, **sizes)
    bounds = trainer.clip_bounds
    rewards.clear()
    metrics = trainer.evaluate()
    groups = torch.tensor([value for batch in rewards for value in batch]).view(-1, 4)
    assert groups.shape == (6, 4)
    assert metrics["eval_reward"] == pytest.approx(groups.mean().item(), rel=1e-5)
    assert metrics["eval_reward_best_of_4"] == pytest.approx(groups.amax(1).mean().item(), rel=1e-5)
    assert trainer.clip_bounds is bounds
    assert not any(key.startswith("eval_bapo") for key in metrics)


def test_best_of_k_weights_rewards_and_leaves_out_what_nothing_scored():
    """Groups of 2: the better of 2 * 3 + 1 and 2 * 1 + 4; no reward at all; one of a single function."""
    nan = math.nan
    rewards = torch.tensor([[3.0, 1.0], [1.0, 4.0], [nan, nan], [nan, nan], [nan, nan], [2.0, nan]])
    assert best_of_k(rewards, torch.tensor([2.0, 1.0]), 2).tolist() == [7.0, 4.0]


# Warnings and errors


@pytest.mark.parametrize(("num_processes", "num_prompts", "needed"), [(1, 7, 8), (2, 15, 16)])
def test_too_few_prompts_for_one_generation_are_rejected_before_the_model_loads(
    tmp_path, monkeypatch, num_processes, num_prompts, needed
):
    """6 rows x 4 steps = 24 samples a generation of each process, 3 of each prompt: 8 prompts."""
    monkeypatch.setattr(BAPOConfig, "world_size", num_processes)
    message = rf"{num_prompts} prompts, but one generation takes {needed} \(`generation_batch_size` {3 * needed} "
    with pytest.raises(ValueError, match=message):
        toy_trainer(tmp_path, model="no/model", trainer_args={"train_dataset": toy_dataset(num_prompts)})


@pytest.mark.parametrize(
    ("tensor", "value", "scope"),
    [
        ("old_per_token_logps", math.nan, "batch"),
        ("ref_per_token_logps", -math.inf, "micro_batch"),
        ("advantages", math.nan, "batch"),
    ],
)
def test_a_value_that_is_not_finite_stops_before_the_optimizer_step(tmp_path, tensor, value, scope):
    class Broken(BAPOTrainer):
        def _compute_loss(self, model, inputs):
            if self.state.global_step == 1:
                inputs[tensor] = inputs[tensor].clone()
                inputs[tensor][0] = value
            return super()._compute_loss(model, inputs)

    model = saved_model(tmp_path)
    trainer = toy_trainer(tmp_path, model=model, trainer_class=Broken, search_scope=scope, beta=0.1)
    with pytest.raises(RuntimeError, match=rf"`{tensor}`.*at update 2, before its optimizer step"):
        trainer.train()
    assert trainer.state.global_step == 1


def test_the_norm_of_a_gradient_in_shards_is_that_of_all_ranks(tmp_path):
    """As FSDP2 returns it: each rank has a part."""
    trainer = toy_trainer(tmp_path)
    norms = [SimpleNamespace(full_tensor=lambda whole=whole: torch.tensor(whole)) for whole in (5.0, math.nan)]
    assert trainer._get_grad_norm(trainer.model, norms[0]) == 5
    with pytest.raises(RuntimeError, match="NaN or infinity in the gradient"):
        trainer._get_grad_norm(trainer.model, norms[1])


def test_a_broken_weight_names_the_log_probabilities(tmp_path):
    broken = InUpdate(3, lambda model: model.model.norm.weight.data[0].fill_(math.nan))
    trainer = toy_trainer(tmp_path, trainer_args={"callbacks": [broken]})
    with pytest.raises(RuntimeError, match=r"`per_token_logps` \(\d+ values\).*at update 3"):
        trainer.train()
