"""Runs that must come out the same: with GRPOTrainer, over shardings, and across a resume."""

import json

import pytest
import torch
from datasets import IterableDataset
from trl import GRPOConfig, GRPOTrainer

from tests.helpers.forked import run_python
from tests.helpers.toy import digits_reward, toy_dataset, toy_model, toy_trainer, training_logs


FIXED = {"ratio_lower_start": 0.8, "ratio_lower_max": 0.8, "ratio_upper_start": 1.28, "ratio_upper_max": 1.28}
TIMES = {"step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos"}


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo"])
@pytest.mark.parametrize("scope", ["batch", "micro_batch"])
def test_fixed_bounds_equal_grpo_trainer_bit_for_bit(tmp_path, loss_type, scope):
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
    bapo, bapo_gradients = run(search_scope=scope, **FIXED)

    assert len(grpo_gradients) == 3
    for left, right in zip(grpo_gradients, bapo_gradients, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
    for (name, left), right in zip(grpo.model.state_dict().items(), bapo.model.state_dict().values(), strict=True):
        assert torch.equal(left, right), name
    grpo_logs, bapo_logs = training_logs(grpo), training_logs(bapo)
    assert max(log["clip_ratio/region_mean"] for log in grpo_logs) > 0.05  # the clip bounds do matter here
    for left, right in zip(grpo_logs, bapo_logs, strict=True):
        assert {key: right[key] for key in left if key not in TIMES} == {
            key: left[key] for key in left if key not in TIMES
        }


def test_grpo_and_adaptive_bounds_do_part(tmp_path):
    """The test above can fail: with a range left to search, the runs differ."""
    fixed = toy_trainer(tmp_path, model=toy_model(), **FIXED)
    adaptive = toy_trainer(tmp_path, model=toy_model(), positive_contribution_target=0.9)
    for trainer in (fixed, adaptive):
        trainer.train()
    assert any(
        not torch.equal(left, right)
        for left, right in zip(fixed.model.parameters(), adaptive.model.parameters(), strict=True)
    )


# Sharding


def launch(script_arguments: list[str], num_processes: int) -> None:
    result = run_python(["-m", "tests.helpers.sharding_worker", *script_arguments], num_processes)
    assert result.returncode == 0, result.stdout + result.stderr


WEIGHED = {"negative_weight_min": 0.05, "positive_contribution_target": 0.7}


@pytest.mark.sharding
@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "grpo"},
        {"loss_type": "dapo"},
        {"loss_type": "dapo", "search_scope": "carried_over", **WEIGHED},
        {"loss_type": "vespo", **WEIGHED},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_sharding_does_not_change_the_bounds(tmp_path, settings):
    """16 rows an update: 1 process x 8 micro-batches of 2, 1 x 1 of 16, and 2 processes x 4 of 2."""
    runs = {}
    for processes, micro_batches, rows in ((1, 8, 2), (1, 1, 16), (2, 4, 2)):
        out = tmp_path / f"{processes}x{micro_batches}.json"
        launch([str(out), str(micro_batches), str(rows), json.dumps(settings)], processes)
        runs[processes, micro_batches] = json.loads(out.read_text())
        assert runs[processes, micro_batches]["num_processes"] == processes
        assert runs[processes, micro_batches]["micro_batches"] == 3 * micro_batches

    reference = runs[1, 8]
    assert len(reference["logs"]) == 3
    chosen = ("bapo/clip_low", "bapo/clip_high", "bapo/negative_weight")
    assert len({tuple(log.get(name) for name in chosen) for log in reference["logs"]}) > 1  # something moves
    for run in runs.values():
        for log, expected in zip(run["logs"], reference["logs"], strict=True):
            for name, value in expected.items():
                if name in (
                    "bapo/clip_low",
                    "bapo/clip_high",
                    "bapo/search_steps",
                    "bapo/target_met",
                    "staleness/max",
                ):
                    assert log[name] == value, name
                else:
                    assert log[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


# Resume


# With 8 prompts an epoch is one generation, so that the resume is in a later one.
@pytest.mark.trainings
@pytest.mark.parametrize(("dataset_size", "shuffle"), [(40, True), (8, True), (8, False)])
def test_a_resumed_run_equals_a_straight_one(tmp_path, dataset_size, shuffle):
    def run(output_dir, resume=None, max_steps=12):
        trainer = toy_trainer(
            output_dir,
            model=toy_model(),
            max_steps=max_steps,
            save_strategy="steps",
            save_steps=8,
            shuffle_dataset=shuffle,
            trainer_args={"train_dataset": toy_dataset(dataset_size)},
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    straight = run(tmp_path / "straight")
    run(tmp_path / "stopped", max_steps=8)
    resumed = run(tmp_path / "stopped", resume=str(tmp_path / "stopped" / "checkpoint-8"))
    assert resumed.state.global_step == 12

    for (name, left), right in zip(
        straight.model.state_dict().items(), resumed.model.state_dict().values(), strict=True
    ):
        assert torch.equal(left, right), name
    for left, right in zip(training_logs(straight)[-4:], training_logs(resumed)[-4:], strict=True):
        keys = [key for key in left if key not in TIMES]
        assert {key: right[key] for key in keys} == {key: left[key] for key in keys}
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
            prompts.append((trainer.state.global_step, kwargs["prompts"]))
            return digits_reward(completions)

        trainer = toy_trainer(
            output_dir, reward_funcs=reward, max_steps=max_steps, save_strategy="steps", save_steps=update,
            shuffle_dataset=shuffle, trainer_args={"train_dataset": stream},
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return prompts, trainer.model.state_dict()

    prompts, straight = run(tmp_path / "straight")
    run(tmp_path / "stopped", max_steps=update)
    for folder in ("straight", "stopped"):
        served, weights = run(tmp_path / "resumed", resume=str(tmp_path / folder / f"checkpoint-{update}"))
        assert served == [(at, rows) for at, rows in prompts if at >= update]
        assert all(torch.equal(weights[name], straight[name]) for name in straight)


@pytest.mark.trainings
@pytest.mark.parametrize("replay", [{}, {"replay_fraction": 0.25}], ids=["fresh", "replay"])
def test_a_resume_within_a_generation_leaves_the_later_ones_where_they_were(tmp_path, replay):
    generated = []

    def reward(completions, **kwargs):
        generated.append(trainer.state.global_step)
        return digits_reward(completions)

    for stop in (5, 12):  # of four updates a generation
        trainer = toy_trainer(
            tmp_path, reward_funcs=reward, max_steps=stop, save_strategy="steps", save_steps=5, **replay
        )
        trainer.train(resume_from_checkpoint=bool(generated))
    assert generated == [0, 4, 5, 8]
