"""Real tasks of the package reasoning-gym. tests/tasks has tests with a fake package."""

import json

import pytest

from bapo_trl.script.datasets import make_task
from bapo_trl.tasks import gym_reward
from benchmarks import chat_task


pytest.importorskip("reasoning_gym")
TWO_TERMS = '{"min_terms": 2, "max_terms": 2, "min_digits": 3, "max_digits": 3, "size": 50}'


def test_a_task_is_made_from_its_name_and_scored_by_its_own_rule():
    task = make_task("reasoning_gym:chain_sum", TWO_TERMS)
    assert task.name == "reasoning_gym:chain_sum"
    assert (len(task.train_dataset), len(task.test_dataset)) == (50, 256)
    row = task.train_dataset[0]
    question = json.loads(row["entry"])["entry"]["question"]
    assert row["prompt"] == [{"role": "user", "content": question}]
    right = row["answer"]
    completions = [f"That is {right}.", f"<answer>{right}</answer>, not 1000", f"{right} or 1000", ""]
    assert task.reward_func(completions, entry=[row["entry"]] * 4) == [1.0, 1.0, 0.0, 0.0]
    again = make_task("reasoning_gym:chain_sum", json.loads(TWO_TERMS))
    assert again.train_dataset["entry"][:] == task.train_dataset["entry"][:]


@pytest.mark.parametrize("name", ["gcd", "letter_counting", "spell_backward", "countdown", "leg_counting"])
def test_right_answers_get_the_full_score(name):
    rows = make_task(f"reasoning_gym:{name}", {"size": 10}).train_dataset
    answers = [f"<answer>{json.loads(entry)['entry']['answer']}</answer>" for entry in rows["entry"]]
    assert make_task(f"reasoning_gym:{name}", {"size": 10}).reward_func(answers, entry=rows["entry"]) == [1.0] * 10


@pytest.mark.parametrize("name", chat_task.TASKS)
def test_the_worked_answers_of_the_study_end_in_the_right_one(name):
    train, held_out = chat_task.problems(name)
    asked = {row["prompt"][-1]["content"] for row in held_out}
    assert len(held_out) == len(asked) == chat_task.HELD_OUT
    assert not asked & {row["prompt"][-1]["content"] for row in train}
    texts = [chat_task.TASKS[name].work_out(json.loads(entry)["entry"]) for entry in train["entry"]]
    assert set(gym_reward(texts, train["entry"])) == {1.0}
