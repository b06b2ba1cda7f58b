"""Counts of a dry run, against real runs and a simulation of micro-batches."""

import math

import pytest
from accelerate.utils import set_seed

from bapo_trl import BAPOConfig
from bapo_trl.batch.staleness import mean_staleness, updates_per_generation
from tests.helpers.toy import CPU, toy_dataset, toy_trainer, training_logs


def config(tmp_path, **settings):
    return BAPOConfig(tmp_path, **{**CPU, "num_generations": 2, "search_scope": "micro_batch", **settings})


SCHEDULES = [  # steps_per_generation, num_iterations, gradient_accumulation_steps
    (4, 1, 1), (8, 2, 4), (1, 1, 1), (6, 1, 4), (3, 1, 2), (5, 2, 3), (2, 1, 4),
]  # fmt: skip


@pytest.mark.parametrize(("steps", "iterations", "window"), SCHEDULES)
def test_ages_are_those_of_every_micro_batch_of_many_generations(tmp_path, steps, iterations, window):
    args = config(
        tmp_path, steps_per_generation=steps, num_iterations=iterations, gradient_accumulation_steps=window,
        per_device_train_batch_size=2,
    )  # fmt: skip
    ages, version, sampled_by, micro_batches = [], 0, 0, 0
    for _ in range(window * 12):  # whole cycles
        sampled_by = version
        for _ in range(steps * iterations):
            ages.append(version - sampled_by)
            micro_batches += 1
            version += micro_batches % window == 0
    assert mean_staleness(args) == pytest.approx(sum(ages) / len(ages))
    assert args.largest_staleness == max(ages)


@pytest.mark.trainings
@pytest.mark.parametrize(("steps", "iterations", "window"), [(4, 2, 2), (3, 1, 2)])
def test_a_run_makes_as_many_updates_on_samples_as_old(tmp_path, steps, iterations, window):
    set_seed(0)
    trainer = toy_trainer(
        tmp_path, steps_per_generation=steps, num_iterations=iterations, gradient_accumulation_steps=window,
        max_steps=-1, num_train_epochs=1, logging_steps=1, search_scope="micro_batch",
        trainer_args={"train_dataset": toy_dataset(30)},
    )  # fmt: skip
    generations = []
    generate = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: generations.append(len(inputs)) or generate(inputs)
    trainer.train()
    samples = trainer.args.generation_batch_size
    assert len(generations) == 30 // (samples / trainer.num_generations)
    assert set(generations) == {samples}
    logs = training_logs(trainer)
    assert (
        abs(len(logs) - len(generations) * updates_per_generation(trainer.args)) < 1
    )  # the last one may be of fewer micro-batches
    cycle = math.lcm(steps * iterations, window) // window
    ages = [log["staleness/mean"] for log in logs[: len(logs) // cycle * cycle]]
    assert sum(ages) / len(ages) == pytest.approx(mean_staleness(trainer.args))
