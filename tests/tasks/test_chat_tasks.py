"""Tasks for chat models: their problems, how answers are extracted, and errors."""

import sys

import pytest

from bapo_trl.script.data.load import make_task
from bapo_trl.tasks import gym
from bapo_trl.tasks.gym import read_answer
from bapo_trl.tasks.sums import last_number_reward


def message(text):
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("59 + 19 = 78.", 1), ("The answer is 78.0", 1), ("78 is 59 + 19", 0), ("It is -78", 0), ("It is 7.8e1", 1),
        ("It is 1e99999999999999999999", 0), ("78,000", 0), ("78th", 1), ("seventy-eight", 0),
    ],
)  # fmt: skip
def test_the_last_number_counts(text, reward):
    after_a_tool = [*message("I shall ask: 78"), {"role": "tool", "content": "78"}, *message(text)]
    assert last_number_reward([text, message(text), after_a_tool], answer=["78"] * 3) == [reward] * 3


@pytest.mark.parametrize(
    ("text", "right_answer", "read"),
    [
        ("<answer>1</answer> or <answer>\n-4 </answer> or 7", "3", "-4"),
        ("<answer>1</answer", "3", "1"),  # not closed, so no tags
        ("Perhaps 1,234.", "3", "1234"),
        ("none", "3", ""),
        ("The 2 kings", "kings", "The 2 kings"),
        ("  yes\n", "", "yes"),
        ("</answer> 2 <answer>", "3", "2"),
    ],
)
def test_an_answer_is_read_by_tags_then_as_the_last_number_then_as_a_whole(text, right_answer, read):
    assert read_answer(text, right_answer) == read


def test_a_task_of_a_missing_package_names_the_package_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r"`dataset_name` is 'reasoning_gym:gcd'.*pip install 'bapo-trl\[reasoning"):
        make_task("reasoning_gym:gcd")


def test_invalid_or_unexpected_task_arguments_raise_an_error():
    with pytest.raises(ValueError, match=r"`task_args` is '\{\"min_terms\": 2', which is not JSON.*write it like"):
        make_task("reasoning_gym:gcd", '{"min_terms": 2')
    with pytest.raises(ValueError, match=r"`task_args` is '\{\}', but .* 'chat_sums', which takes no arguments"):
        make_task("chat_sums", "{}")
    assert make_task("data.jsonl") is make_task(None) is None


class Halving:
    """Task in the form of reasoning-gym, whose answer is half of the given number."""

    def __init__(self, size, seed, step=1):
        self.entries = [self.entry(2 * (seed + i) // step * step) for i in range(size)]

    def entry(self, number):
        return {"question": f"Half of {number}?", "answer": str(number // 2), "metadata": {"tuple": (1, 2)}}

    def __iter__(self):
        return iter(self.entries)

    def score_answer(self, answer, entry):
        return 1.0 if answer == entry["answer"] else 0.25 * bool(answer)


@pytest.fixture
def made(monkeypatch):
    """Return a function that makes reasoning-gym use a task class, and returns the arguments of each created task."""

    def make_of(task_class):
        calls = []
        monkeypatch.setattr(gym, "_make", lambda name, args: calls.append(args) or task_class(**args))
        return calls

    gym._rebuild.cache_clear()
    yield make_of
    gym._rebuild.cache_clear()


def test_held_out_problems_are_not_in_the_training_set(made):
    """Like reasoning-gym, the fake task makes problem i of a seed from seed + i."""
    made(Halving)
    task = gym.load_gym_task("reasoning_gym:halving", '{"size": 5, "seed": 7}')
    train, test = ([row["prompt"][0]["content"] for row in rows] for rows in (task.train_dataset, task.test_dataset))
    assert train == [f"Half of {number}?" for number in (14, 16, 18, 20, 22)]
    assert (len(test), test[0]) == (256, "Half of 24?")
    assert task.train_dataset[1]["answer"] == "8"
    # In steps of 8, the sixth problem is 24, and the first one held out is 24 again
    task = gym.load_gym_task("halving", {"size": 6, "seed": 7, "step": 8})
    assert task.test_dataset[0]["prompt"][0]["content"] == "Half of 24?"
    assert [row["prompt"][0]["content"] for row in task.train_dataset] == ["Half of 8?"] + ["Half of 16?"] * 4


def test_the_reward_is_the_score_of_the_task(made):
    calls = made(Halving)
    entries = gym.load_gym_task("halving", {"size": 3}).train_dataset["entry"][:]
    calls.clear()
    gym._rebuild.cache_clear()
    completions = [message("Half of 0 is 0."), "<answer>1</answer>, not 2", "9"]
    assert gym.gym_reward(completions, entry=entries, trainer_state=None) == [1.0, 1.0, 0.25]
    assert calls == [{"size": 3, "seed": 0}]  # once for all rows
