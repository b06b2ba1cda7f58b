"""The asynchronous trainer, on samples that a script gives: TRL's loss, and bounds as a slow search finds them."""

import math
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from bapo_trl.clip_bounds import BoundGrid
from bapo_trl.experimental import AsyncBAPOConfig, AsyncBAPOTrainer
from bapo_trl.phase_clock import PHASES
from bapo_trl.upstream.fixes import end_training
from tests.helpers import oracle
from tests.helpers.alike import assert_same_weights
from tests.helpers.asynchronous import (
    SIZES,
    NoTransfer,
    async_trainer,
    on_cpu,
    save_toy,
    scripted_samples,
    token_logps,
)
from tests.helpers.commands import succeeded
from tests.helpers.forked import run_function
from tests.helpers.passing_time import Time
from tests.helpers.toy import toy_model, training_logs


GRPO_BOUNDS = {
    "ratio_lower_start": 0.8, "ratio_lower_max": 0.8, "ratio_upper_start": 1.2, "ratio_upper_max": 1.2
}  # fmt: skip


@pytest.fixture(scope="module")
def samples():
    return scripted_samples(toy_model(), 128)


def trained(folder, samples, *args, resume=None, **settings):
    with on_cpu():
        trainer = async_trainer(folder, samples, *args, **settings)
        trainer.train(resume_from_checkpoint=resume)
    return trainer


def without_times(log):
    of_time = ("perf/", "time", "runtime", "per_s", "total_flos", "queue_s")
    return {name: value for name, value in log.items() if not any(part in name for part in of_time)}


@pytest.mark.trainings
@pytest.mark.parametrize("settings", [{}, {"token_budget": 60}, {"gradient_checkpointing": False}], ids=str)
def test_with_fixed_bounds_it_is_trls_trainer(tmp_path, samples, settings):
    ours = trained(tmp_path / "ours", samples, **GRPO_BOUNDS, **settings)
    trls = trained(tmp_path / "trls", samples, AsyncGRPOTrainer, AsyncGRPOConfig, **settings)
    assert_same_weights(ours, trls)
    assert len(training_logs(ours)) == SIZES["max_steps"]
    for log, other in zip(training_logs(ours), training_logs(trls), strict=True):
        common = without_times(other)
        assert {name: log[name] for name in common} == common
        assert log["bapo/clip_low"] == 0.8
    assert 0 < training_logs(ours)[0]["clip_ratio/high_mean"] < 1


def weighed_tokens(model, samples):
    """Ratio, advantage and weight of each token of the loss of a micro-batch, one sample after the other."""
    count = sum(int(sample.completion_mask.sum()) for sample in samples)
    tokens = []
    for sample in samples:
        logps = token_logps(model, sample.input_ids)
        for place, is_own in enumerate(sample.completion_mask):
            if is_own:
                ratio = math.exp(float(logps[place]) - float(sample.old_log_probs[place]))
                tokens.append((ratio, sample.advantage, 1 / count))
    return tokens


@pytest.mark.parametrize("measure", ["gradient", "surrogate"])
def test_the_bounds_of_a_micro_batch_are_those_of_a_slow_search(tmp_path, samples, measure):
    settings = {"search_scope": "micro_batch", "contribution_measure": measure, "gradient_accumulation_steps": 1}
    trainer = trained(tmp_path, samples, max_steps=1, **settings)
    tokens = weighed_tokens(toy_model(), samples[:4])
    found = oracle.search(tokens, BoundGrid(), 0.5, measure, "upper_first")
    log = training_logs(trainer)[0]
    clipped = sum(advantage > 0 and ratio > found.high for ratio, advantage, _ in tokens) / len(tokens)
    unmoved = sum(advantage > 0 and ratio > 1.2 for ratio, advantage, _ in tokens) / len(tokens)
    assert log["clip_ratio/high_mean"] == pytest.approx(clipped)  # TRL's loss has them
    assert clipped < unmoved
    assert found.steps > 0
    assert (log["bapo/clip_low"], log["bapo/clip_high"]) == pytest.approx((found.low, found.high))
    assert log["bapo/positive_share"] == pytest.approx(found.positive_share, abs=1e-5)
    assert log["bapo/positive_share_initial"] == pytest.approx(found.initial_positive_share, abs=1e-5)


def test_carried_over_measures_the_shares_of_all_micro_batches(tmp_path, samples):
    """The first update is forecast as of fresh samples: its bounds are those of ratios of 1."""
    trainer = trained(tmp_path, samples, max_steps=1)
    log = training_logs(trainer)[0]
    batches = samples[:4], samples[4:8]
    tokens = [token for each in batches for token in weighed_tokens(toy_model(), each)]
    fresh = [(1.0, advantage, weight) for _, advantage, weight in tokens]
    forecast = oracle.search(fresh, BoundGrid(), 0.5, "gradient", "upper_first")
    assert (log["bapo/clip_low"], log["bapo/clip_high"]) == pytest.approx((forecast.low, forecast.high))
    positive, negative = oracle.token_contributions(tokens, forecast.low, forecast.high, "gradient")
    assert log["bapo/positive_share"] == pytest.approx(positive / (positive + negative), abs=1e-5)


def test_a_log_says_where_the_time_went(tmp_path, samples, monkeypatch):
    time = Time(monkeypatch)
    for owner, name, seconds in (
        (NoTransfer, "send_weights", 3),
        (AsyncGRPOTrainer, "get_batch_samples", 5),
        (AsyncGRPOTrainer, "compute_loss", 7),
    ):
        monkeypatch.setattr(owner, name, time.passing(getattr(owner, name), seconds))
    logs = training_logs(trained(tmp_path, samples, max_steps=3, gradient_accumulation_steps=2))
    for log in logs:
        seconds = {name: log[f"time/{name}"] for name in PHASES if log[f"time/{name}"]}
        assert seconds == {"weights": 3, "waiting": 5, "training": 14}


@pytest.mark.trainings
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, samples):
    """Rollouts are TRL's: the script goes on where the first run had trained its samples."""
    size = {"save_strategy": "steps", "save_steps": 2, "positive_contribution_target": 0.35}
    uninterrupted = trained(tmp_path / "first", samples, **size)
    checkpoint = str(tmp_path / "first" / "run" / "checkpoint-2")
    (tmp_path / "second").mkdir()
    resumed = trained(tmp_path / "second", samples[16:], resume=checkpoint, **size)
    assert_same_weights(resumed, uninterrupted)
    names = ("bapo/clip_low", "bapo/clip_high", "bapo/positive_share", "loss")
    for log, other in zip(training_logs(resumed)[-2:], training_logs(uninterrupted)[-2:], strict=True):
        assert {name: log[name] for name in names} == {name: other[name] for name in names}


def search_on_a_rank(out: str) -> None:
    samples = scripted_samples(toy_model(), 32)
    folder = Path(out) / str(PartialState(cpu=True).process_index)
    model, grid = toy_model(), BoundGrid()
    exact = weighed_tokens(model, samples[:8])
    batches = [weighed_tokens(model, part) for part in (samples[:8], samples[8:16])]
    fresh = [(1.0, advantage, weight) for part in batches for _, advantage, weight in part]
    for scope, count, tokens in (("micro_batch", 1, exact), ("carried_over", 2, fresh)):
        size = {"max_steps": 1, "gradient_accumulation_steps": count, "search_scope": scope}
        trainer = trained(folder, samples, **size, positive_contribution_target=0.4)
        assert trainer.accelerator.num_processes == 2
        found = oracle.search(tokens, grid, 0.4, "gradient", "upper_first")
        low, high = trainer.clip_bounds.low.item(), trainer.clip_bounds.high.item()
        assert (low, high) == pytest.approx((found.low, found.high))
    end_training(trainer)


@pytest.mark.processes
def test_two_ranks_search_together(tmp_path):
    for rank in ("0", "1"):
        save_toy(tmp_path / rank)
    succeeded(run_function(search_on_a_rank, tmp_path, ranks=2))


def test_an_adapter_is_sent_merged_and_does_not_drift(tmp_path, samples):
    from peft import LoraConfig

    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    settings = {"peft_config": adapter, "dtype": "bfloat16", "gradient_checkpointing": False}
    with on_cpu():
        trainer = async_trainer(tmp_path, samples, **settings)
        base = {name: each.clone() for name, each in trainer.model.named_parameters() if "lora" not in name}
        trainer.train()
    after = dict(trainer.model.named_parameters())
    assert all(each.equal(after[name]) for name, each in base.items())
    first, *_, last = trainer.weight_transfer.sent
    assert len(trainer.weight_transfer.sent) == 1 + SIZES["max_steps"]
    name = "model.layers.0.self_attn.q_proj.weight"
    layer = trainer.model.base_model.model.model.layers[0].self_attn.q_proj
    merged = layer.base_layer.weight.float() + layer.get_delta_weight("default").float()
    torch.testing.assert_close(last[name].float(), merged, rtol=2**-7, atol=1e-6)
    assert not first[name].equal(last[name])
    assert first["lm_head.weight"].equal(last["lm_head.weight"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"search_scope": "batch"}, "`search_scope` is 'batch'"),
        ({"negative_weight_min": 0.5}, "`negative_weight_min` is 0.5"),
        ({"epsilon": 0.2}, "`epsilon` is 0.2"),
        ({"epsilon_high": 0.28}, "`epsilon_high` is 0.28"),
        ({"ratio_upper_start": 0.5}, "`ratio_upper_start` is 0.5"),
        ({**GRPO_BOUNDS, "positive_contribution_target": 0.4}, "0.4, but it has no effect"),
    ],
    ids=str,
)
def test_settings_without_a_meaning_are_an_error(settings, message):
    with pytest.raises(ValueError, match=message):
        AsyncBAPOConfig("out", bf16=False, use_cpu=True, **settings)


def test_trls_config_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="make it an AsyncBAPOConfig"):
        AsyncBAPOTrainer("model", [len], AsyncGRPOConfig(str(tmp_path), bf16=False, use_cpu=True))


def test_tokens_that_trl_cannot_send_are_an_error(tmp_path, samples):
    from peft import LoraConfig

    adapter = LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[1, 5])
    with on_cpu(), pytest.raises(ValueError, match="The adapter has `trainable_token_indices`"):
        async_trainer(tmp_path, samples, peft_config=adapter)
