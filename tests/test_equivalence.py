"""Runs that must come out the same: with GRPOTrainer, over shardings, and across a resume."""

import json

import pytest
import torch
from datasets import IterableDataset
from trl import GRPOConfig, GRPOTrainer

from bapo_trl.clip_bounds import SCOPES
from bapo_trl.clip_bounds.update_log import UPDATE_METRICS
from tests.helpers.alike import assert_same_logs, assert_same_tensors, assert_same_weights
from tests.helpers.commands import succeeded
from tests.helpers.forked import run_function
from tests.helpers.ranks import finish, read_ranks
from tests.helpers.scripted import Scripted
from tests.helpers.toy import digits_reward, toy_dataset, toy_model, toy_run, toy_trainer, training_logs


FIXED = {"ratio_lower_start": 0.8, "ratio_lower_max": 0.8, "ratio_upper_start": 1.28, "ratio_upper_max": 1.28}


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo"])
def test_fixed_bounds_equal_grpo_trainer_bit_for_bit(tmp_path, loss_type):
    def run(**args):
        trainer = toy_trainer(tmp_path, model=toy_model(), loss_type=loss_type, max_steps=3, **args)
        gradients = []
        step = trainer.create_optimizer().step

        def recording_step(*args, **kwargs):
            gradients.append([p.grad.clone() for p in trainer.model.parameters() if p.grad is not None])
            return step(*args, **kwargs)

        trainer.optimizer.step = recording_step
        trainer.train()
        return trainer, gradients

    grpo, grpo_gradients = run(trainer_class=GRPOTrainer, config_class=GRPOConfig, epsilon=0.2, epsilon_high=0.28)
    assert len(grpo_gradients) == 3
    assert max(log["clip_ratio/region_mean"] for log in training_logs(grpo)) > 0.05  # the clip bounds matter here

    for scope in SCOPES:
        bapo, bapo_gradients = run(search_scope=scope, micro_batch_layout="padded", **FIXED)
        for left, right in zip(grpo_gradients, bapo_gradients, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
        assert_same_weights(grpo, bapo)
        assert_same_logs(grpo, bapo)


# Sharding


SAME = ("bapo/clip_low", "bapo/clip_high", "bapo/search_steps", "bapo/target_met", "staleness/max")
WEIGHED = {"negative_weight_min": 0.05, "positive_contribution_target": 0.7}


def train_on_a_rank(out: str, micro_batches: str, rows: str, settings: str) -> None:
    trainer = toy_run(
        out,
        trainer_class=Scripted,
        **json.loads(settings),
        optim="sgd",  # Adam would turn the rounding of a tiny gradient into a full step
        learning_rate=2.0,
        max_grad_norm=0.0,
        gradient_accumulation_steps=int(micro_batches),
        steps_per_generation=int(micro_batches),
        per_device_train_batch_size=int(rows),
        num_generations=4,
        num_iterations=3,
        max_steps=3,
        trainer_args={"train_dataset": toy_dataset(8)},
    )
    finish(trainer, out, micro_batches=trainer.num_micro_batches)


@pytest.mark.sharding
@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "grpo"},
        {"loss_type": "dapo", "search_scope": "batch"},
        {"loss_type": "dapo", **WEIGHED},
        {"loss_type": "vespo", "search_scope": "batch", **WEIGHED},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_sharding_does_not_change_the_bounds(tmp_path, settings):
    """
    16 rows an update: 1 process x 8 micro-batches of 2, 1 x 1 of 16, and 2 processes x 4 of 2.

    `carried_over` searches on the tokens of an update's only micro-batch, and forecasts several: 1 x 2 of 8 instead.
    """
    runs = {}
    few = (1, 1, 16) if "search_scope" in settings else (1, 2, 8)
    for processes, micro_batches, rows in ((1, 8, 2), few, (2, 4, 2)):
        out = tmp_path / f"{processes}x{micro_batches}"
        succeeded(run_function(train_on_a_rank, out, micro_batches, rows, json.dumps(settings), ranks=processes))
        runs[processes, micro_batches] = read_ranks(out, processes, micro_batches=3 * micro_batches)[0]

    reference = runs[1, 8]
    assert len(reference["logs"]) == 3
    chosen = ("bapo/clip_low", "bapo/clip_high", "bapo/negative_weight")
    assert len({tuple(log.get(name) for name in chosen) for log in reference["logs"]}) > 1  # something moves
    for run in runs.values():
        for log, expected in zip(run["logs"], reference["logs"], strict=True):
            for name in UPDATE_METRICS:
                if name in expected:
                    value = expected[name]
                    close = value if name in SAME else pytest.approx(value, rel=1e-4, abs=1e-6)
                    assert log[name] == close, name


# Resume


# With 8 prompts an epoch is one generation, so that the resume is in a later one. More in test_resume.
@pytest.mark.trainings
@pytest.mark.parametrize(
    ("dataset_size", "shuffle", "scope"), [(40, True, "batch"), (8, True, "carried_over"), (8, False, "carried_over")]
)
def test_a_resumed_run_equals_a_straight_one(tmp_path, dataset_size, shuffle, scope):
    def run(output_dir, resume=None, max_steps=12):
        return toy_run(
            output_dir, max_steps=max_steps, save_strategy="steps", save_steps=8, shuffle_dataset=shuffle,
            search_scope=scope, trainer_args={"train_dataset": toy_dataset(dataset_size)}, resume=resume,
        )  # fmt: skip

    straight = run(tmp_path / "straight")
    run(tmp_path / "stopped", max_steps=8)
    resumed = run(tmp_path / "stopped", resume=str(tmp_path / "stopped" / "checkpoint-8"))
    assert resumed.state.global_step == 12

    assert_same_weights(straight, resumed)
    assert_same_logs(straight, resumed, last=4)
    assert straight.clip_bounds.high == resumed.clip_bounds.high


@pytest.mark.trainings
@pytest.mark.parametrize("shuffle", [True, False], ids=["shuffled", "in order"])
@pytest.mark.parametrize("update", [4, 8, 12], ids=["within the first pass", "at its end", "within the second"])
def test_a_resumed_stream_goes_on_where_it_was(tmp_path, update, shuffle):
    """A pass is of two generations, of four updates each. Four prompts are left over at its end."""
    stream = IterableDataset.from_generator(lambda: ({"prompt": f"{i}+{i + 1}="} for i in range(20)))

    def run(output_dir, max_steps=20, resume=None):
        prompts = []

        def reward(completions, **kwargs):
            prompts.append((kwargs["trainer_state"].global_step, kwargs["prompts"]))
            return digits_reward(completions)

        trainer = toy_run(
            output_dir, reward_funcs=reward, max_steps=max_steps, save_strategy="steps", save_steps=update,
            shuffle_dataset=shuffle, trainer_args={"train_dataset": stream}, resume=resume,
        )  # fmt: skip
        return prompts, trainer.model.state_dict()

    prompts, straight = run(tmp_path / "straight")
    run(tmp_path / "stopped", max_steps=update)
    for folder in ("straight", "stopped"):
        served, weights = run(tmp_path / "resumed", resume=str(tmp_path / folder / f"checkpoint-{update}"))
        assert served == [(at, rows) for at, rows in prompts if at >= update]
        assert_same_tensors(weights, straight)


@pytest.mark.trainings
@pytest.mark.parametrize("replay", [{}, {"replay_fraction": 0.25}], ids=["fresh", "replay"])
def test_a_resume_within_a_generation_leaves_the_later_ones_where_they_were(tmp_path, replay):
    generated = []

    def reward(completions, trainer_state, **kwargs):
        generated.append(trainer_state.global_step)
        return digits_reward(completions)

    for stop in (5, 12):  # of four updates a generation
        saving = {"save_strategy": "steps", "save_steps": 5, **replay}
        toy_run(tmp_path, reward_funcs=reward, max_steps=stop, resume=bool(generated), **saving)
    assert generated == [0, 4, 5, 8]
