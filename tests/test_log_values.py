"""What a line of the log says of the updates that it covers: means, maxima, minima, nothing where all is masked."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

from bapo_trl import BAPOTrainer
from bapo_trl.batch.log_values import LARGEST, SMALLEST
from bapo_trl.batch.update_means import OF_TOKENS, average_update
from bapo_trl.clip_bounds.update_log import UPDATE_METRICS
from bapo_trl.replay.mixer import REPLAY_METRICS
from bapo_trl.report.figure import PANELS
from bapo_trl.vllm_server.mismatch import MISMATCH_METRICS
from tests.helpers.alike import TIMES, assert_same_weights
from tests.helpers.commands import ROOT
from tests.helpers.toy import (
    ON_GPU,
    InUpdate,
    digits_reward,
    ending_model,
    toy_dataset,
    toy_run,
    toy_trainer,
    training_logs,
)


ROUNDING = 1e-8 if ON_GPU else 1e-12  # a GPU sums the loss in float32
# Not means: of the last update, totals, and what TRL itself takes as the latest value
LATEST = {"grad_norm", "learning_rate", "epoch", "step", "num_tokens"}

POOL_AND_QUEUE = {
    "partial_rollout_oversampling": 1.5, "partial_rollout_chunk_length": 3, "replay_fraction": 0.25, "max_steps": 10,
}  # fmt: skip


class LogWithin(TrainerCallback):
    """Writes a log line after the first micro-batch of each update."""

    def on_substep_end(self, args, state, control, **kwargs):
        self.trainer.log({"within": state.global_step})


def never_end(model) -> None:
    """Let no completion end, so that `mask_truncated_completions` masks all of them."""
    model.lm_head.weight.data[model.config.eos_token_id, 0] = -100.0


def cut_off_run(output_dir, **settings):
    """A generation of two updates in which most completions end, and generations in which none does."""
    return toy_run(
        output_dir, model=ending_model(eos_logit=3.5), mask_truncated_completions=True, num_iterations=1,
        max_completion_length=20, trainer_args={"callbacks": [InUpdate(3, never_end)]}, **settings,
    )  # fmt: skip


def assert_lines_cover(lines: list[dict], updates: list[dict]) -> None:
    """See that each line is what its updates, logged one by one by an equal run, make of it."""
    first = 0
    for line in lines:
        covered = updates[first : line["step"]]
        first = line["step"]
        assert line.keys() == {name for log in covered for name in log}
        for name in line.keys() - LATEST - TIMES:
            values = [log[name] for log in covered if name in log]
            if name in LARGEST:
                assert line[name] == max(values), name
            elif name in SMALLEST:
                assert line[name] == min(values), name
            else:
                assert line[name] == pytest.approx(sum(values) / len(values), rel=1e-6, abs=ROUNDING), name


@pytest.mark.trainings
@pytest.mark.parametrize("run", [toy_run, cut_off_run], ids=["trained", "some updates masked"])
def test_a_line_has_the_largest_maximum_the_smallest_minimum_and_means_of_what_is_defined(tmp_path, run):
    # A line is a mean over micro-batches. With one per update, it equals the mean over updates even if some are masked
    one_per_update = {"gradient_accumulation_steps": 1, "steps_per_generation": 2}
    settings = {"model": ending_model(), **POOL_AND_QUEUE} if run is toy_run else {"max_steps": 8, **one_per_update}
    updates = training_logs(run(tmp_path / "each", **settings))
    again = {"model": ending_model()} if run is toy_run else {}
    lines = training_logs(run(tmp_path / "lines", **{**settings, **again, "logging_steps": 4}))
    assert_lines_cover(lines, updates)
    ours = ("bapo/", "ratio/", "staleness/", "padding/", "partial/", "replay/")
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert all(f"`{name}`" in page for line in lines for name in line if name.startswith(ours))
    assert len({log["ratio/max"] for log in updates if "ratio/max" in log}) > 1
    if run is toy_run:  # samples of several ages in a line
        assert all(line["staleness/max"] > line["staleness/mean"] + 0.5 for line in lines)


def test_all_metrics_of_ours_that_are_maxima_or_minima_are_reduced_as_such():
    ours = {*UPDATE_METRICS, *REPLAY_METRICS, *MISMATCH_METRICS, "partial/segments_max"}
    assert {name for name in ours if name.endswith(("/max", "_max"))} == set(LARGEST)
    assert {name for name in ours if name.endswith(("/min", "_min"))} == set(SMALLEST)
    lines = [line for panel in PANELS for line in panel.lines]
    # `sample/` is of TRL's asynchronous trainer, which reduces its own
    drawn = {line.metric: line.over_seeds for line in lines if not line.metric.startswith("sample/")}
    assert {name for name, part in drawn.items() if part == "high"} == drawn.keys() & set(LARGEST)
    assert {name for name, part in drawn.items() if part == "low"} == drawn.keys() & set(SMALLEST)


# Updates that train nothing


def test_an_update_of_masked_rows_alone_logs_no_value_of_tokens(tmp_path):
    logs = training_logs(cut_off_run(tmp_path, max_steps=4))
    measured = {*UPDATE_METRICS, *OF_TOKENS} - {"bapo/masked_share"}
    for log in logs[:2]:
        assert log["bapo/masked_share"] < 1
        assert log["entropy"] > 0
        assert {"bapo/clip_low", "ratio/max", "staleness/max", "clip_ratio/region_mean"} <= log.keys()
    for log in logs[2:]:
        assert log["bapo/masked_share"] == 1
        assert not measured & log.keys()
        assert log["grad_norm"] == 0


def micro_batch(loss_tokens, num_rows=2, skipped_tokens=0, skipped=0, counted=None, fillers=0):
    """What two ranks know of a micro-batch, as far as TRL's values need it."""
    return SimpleNamespace(
        loss_tokens=loss_tokens, counted=loss_tokens if counted is None else counted, num_rows=num_rows,
        fillers=fillers, skipped=skipped, trl_loss_tokens=loss_tokens + skipped_tokens, trl_rows=num_rows + skipped,
    )  # fmt: skip


def averaged(values, update, of_samples=(), is_padded=False):
    values = {name: list(each) for name, each in values.items()}
    average_update(values, update, of_samples, is_padded)
    return values


def test_in_trls_layout_a_micro_batch_without_a_token_counts_in_no_mean():
    """TRL takes its entropy and clip ratios for 0."""
    values = {"entropy": [9.0, 2.0, 0.0], "clip_ratio/low_mean": [9.0, 0.5, 0.0], "reward": [1.0]}
    found = averaged(values, [micro_batch(6), micro_batch(0)], is_padded=True)
    assert found["reward"] == [1.0]
    assert found["entropy"][:2] == [9.0, 2.0]
    assert found["clip_ratio/low_mean"][:2] == [9.0, 0.5]
    assert math.isnan(found["entropy"][2])


def test_means_are_over_the_tokens_of_the_update_and_skipped_samples_are_not_clipped():
    update = [micro_batch(6), micro_batch(2, skipped_tokens=4, skipped=1), micro_batch(0)]
    values = {
        "entropy": [9.0, 2.0, 6.0, 0.0], "clip_ratio/low_mean": [9.0, 0.5, 0.25, 0.0],
        "clip_ratio/low_min": [9.0, 0.3, 0.1, math.nan], "clip_ratio/high_max": [9.0, 0.6, 0.2, math.nan],
    }  # fmt: skip
    assert averaged(values, update) == {
        "entropy": [9.0, (6 * 2.0 + 2 * 6.0) / 8],
        "clip_ratio/low_mean": [9.0, (6 * 0.5 + 2 * 0.25) / 12],
        "clip_ratio/low_min": [9.0, 0.0],  # of the skipped sample
        "clip_ratio/high_max": [9.0, 0.6],
    }


def test_values_of_samples_are_weighted_by_samples():
    update = [micro_batch(6, num_rows=4), micro_batch(2, num_rows=2, fillers=1)]  # a filler of weight 1
    values = {"clip_ratio/low_mean": [0.5, 0.0], "vespo/phi_seq_mean": [1.0, 1.5]}
    found = averaged(values, update, of_samples=values)
    assert found == {"clip_ratio/low_mean": [4 * 0.5 / 6], "vespo/phi_seq_mean": [(4 * 1.0 + 2.0) / 5]}


def test_without_a_token_there_is_no_value():
    found = averaged({"entropy": [0.0], "clip_ratio/low_mean": [0.0]}, [micro_batch(0)])
    assert all(math.isnan(value) for (value,) in found.values())
    found = averaged({"clip_ratio/low_mean": [0.0]}, [micro_batch(0, skipped_tokens=3, skipped=1)])
    assert found == {"clip_ratio/low_mean": [0.0]}


@pytest.mark.parametrize("reward", [None, 1.0], ids=["undefined", "the same for all"])
def test_an_undefined_value_is_an_absent_key(tmp_path, reward):
    """In an evaluation too: a tracker would warn of each `None`."""
    logged = []

    class Keep(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            logged.append(logs)

    toy_run(
        tmp_path, reward_funcs=lambda completions, **kwargs: [reward] * len(completions),
        max_steps=2, skip_zero_advantage=False, eval_strategy="steps", eval_steps=1,
        per_device_eval_batch_size=6, trainer_args={"eval_dataset": toy_dataset(4), "callbacks": [Keep()]},
    )  # fmt: skip
    assert not [name for log in logged for name, value in log.items() if value is None or math.isnan(value)]
    names = {name for log in logged for name in log}
    assert {"entropy", "bapo/masked_share", "eval_entropy"} <= names
    assert "bapo/positive_share" not in names
    assert ("reward" in names) == ("eval_reward" in names) == (reward is not None)


# Metrics that say nothing under the settings

FIXED = {"ratio_lower_max": 0.6, "ratio_upper_max": 1.2}
BOUNDS = {"bapo/clip_low", "bapo/clip_high"}
SEARCH = {"bapo/search_steps", "bapo/target_met", "bapo/positive_share_initial"}
WEIGHT = {"negative_weight_min": 0.5}


@pytest.mark.parametrize(
    ("settings", "logged"),
    [
        ({}, BOUNDS | SEARCH),
        ({"ratio_upper_max": 1.2}, BOUNDS | SEARCH),
        (FIXED, BOUNDS),
        ({**FIXED, **WEIGHT}, BOUNDS | SEARCH - {"bapo/search_steps"}),
        ({**FIXED, **WEIGHT, "positive_contribution_target": 1.0}, BOUNDS | {"bapo/positive_share_initial"}),
        *(({"loss_type": loss}, set()) for loss in ("cispo", "sapo", "vespo")),
        ({"loss_type": "cispo", **WEIGHT}, SEARCH - {"bapo/search_steps"}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_run_logs_bounds_and_search_where_there_are_some(tmp_path, settings, logged):
    cap = {"epsilon_high": 5.0} if settings.get("loss_type") == "cispo" else {}
    (log,) = training_logs(toy_run(tmp_path, max_steps=1, **settings, **cap))
    assert (BOUNDS | SEARCH) & log.keys() == logged
    assert log["bapo/positive_share"] > 0


@pytest.mark.trainings
@pytest.mark.parametrize("masked", [0, 1])
def test_a_log_line_within_an_update_takes_the_values_so_far(tmp_path, masked, monkeypatch):
    """Of two micro-batches, one without a token, the first is in one line, and the second in another."""

    class OneIsMasked(BAPOTrainer):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            rows = torch.arange(len(batch["completion_mask"])) // self.args.per_device_train_batch_size
            return {**batch, "completion_mask": batch["completion_mask"] * (rows % 2 != masked).unsqueeze(1)}

    monkeypatch.setattr(grpo_trainer, "shuffle_sequence_dict", lambda batch: batch)
    settings = {"trainer_class": OneIsMasked, "micro_batch_layout": "padded"}
    plain = toy_run(tmp_path / "plain", **settings)
    callback = LogWithin()
    trainer = toy_trainer(tmp_path, **settings, trainer_args={"callbacks": [callback]})
    callback.trainer = trainer
    trainer.train()
    assert_same_weights(trainer, plain)
    assert sum("within" in log for log in trainer.state.log_history) == 4
    for log, of_plain in zip(training_logs(trainer), training_logs(plain), strict=True):
        assert log["bapo/clip_high"] == of_plain["bapo/clip_high"]
        assert log.get("entropy") == (of_plain["entropy"] if masked == 0 else None)


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, BAPOTrainer])
def test_a_reward_writes_a_log_line_within_an_update_that_spans_generations(tmp_path, trainer_class):
    def reward(completions, **kwargs):
        trainer.log({"generated": len(completions)})
        return digits_reward(completions)

    scope = {"search_scope": "micro_batch"} if trainer_class is BAPOTrainer else {"config_class": GRPOConfig}
    settings = {"steps_per_generation": 1, "num_iterations": 1, "max_steps": 2, **scope}
    trainer = toy_trainer(tmp_path, trainer_class=trainer_class, reward_funcs=reward, **settings)
    trainer.train()
    assert sum("generated" in log for log in trainer.state.log_history) == 4
