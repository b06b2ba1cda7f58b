"""The task of the partial rollouts' benchmarks: its problems, its demonstrations, its reward and its warm start."""

import random
import re
from dataclasses import replace

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from bapo_trl.tasks import load_task
from benchmarks import long_tailed_sums
from benchmarks.long_tailed_sums import final_sum_reward, load_long_tailed_sums
from benchmarks.warm_start import warm_start_path


@pytest.fixture(scope="module")
def task():
    return load_long_tailed_sums()


# The longest filler of a demonstration: 52 letters, two of each
COUNTDOWN = "".join(2 * letter for letter in "/.-,*&%$#!zyxwvuZYXWVUTSRQPONMLKJIHGFEDCBA")


def plain(text):
    """A number of the task in digits, the slow way."""
    return str("abcdefghijklmnopqrst".index(text[0])) + text[1]


def test_problems_and_splits_are_those_of_the_demo(task):
    sums = load_task()
    for mine, demo in ((task.train_dataset, sums.train_dataset), (task.test_dataset, sums.test_dataset)):
        assert len(mine) == len(demo)
        for row, other in zip(mine, demo, strict=True):
            a, b = re.fullmatch(r"([a-j]\d)\+([a-j]\d)", row["prompt"]).groups()
            assert f"{int(plain(a))}+{int(plain(b))}=" == other["prompt"]
            assert str(int(plain(row["answer"]))) == other["answer"]
    other = load_long_tailed_sums(seed=1)
    assert other.train_dataset["prompt"][:] != task.train_dataset["prompt"][:]


def test_demonstrations_are_of_the_alphabet_and_end_before_the_cap(task):
    prompts, rng = task.train_dataset["prompt"][:], random.Random(1)
    demonstrations = [task.warm_start.demonstrate(prompt, rng) for prompt in prompts]
    assert max(map(len, demonstrations)) < 108 < task.max_new_tokens
    assert len("d7+f8") + task.max_new_tokens <= task.warm_start.model["max_position_embeddings"]
    assert set("".join(demonstrations + prompts)) <= set(task.warm_start.alphabet)


def test_the_demonstrator_adds_as_in_the_demo(monkeypatch):
    for rate, answer in ((0.0, "=o3"), (1.0, "=d3")):  # 85+58=143; without the two carries 33
        monkeypatch.setattr("benchmarks.warm_start.FORGOTTEN_CARRY_RATE", rate)
        text = long_tailed_sums.demonstrate("i5+f8", random.Random(0))
        assert text == COUNTDOWN[len(COUNTDOWN) - (len(text) - len(answer)) :] + answer
        assert len(text) > len(answer)
        assert long_tailed_sums.demonstrate_sum("i5+f8", random.Random(0)) == answer


def test_only_a_filler_and_then_the_answer_are_rewarded():
    right = ["=j5", "AA=j5", "CCBBAA=j5", "CAB=j5", "}=j5", "AA..=j5"]  # the filler need not count right
    wrong = ["j5", "AAj5", "AA=j5A", "AA=Aj5", "AA==j5", "=j", "=j55", "AAAA", "=", "", "=j5=j5", "a=j5", "A =j5"]
    completions = right + wrong
    rewards = final_sum_reward(completions, answer=["j5"] * len(completions), prompts=["d7+f8"] * len(completions))
    assert rewards == [1.0] * len(right) + [0.0] * len(wrong)


def test_the_task_owns_its_warm_start(task, tmp_path, monkeypatch):
    """Of its own tokenizer and model; a few updates show that."""
    monkeypatch.setenv("BAPO_TRL_CACHE", str(tmp_path))
    settings = {"num_steps": 2, "batch_size": 3}
    lesson = replace(task.warm_start.first_lesson, **settings)
    path = warm_start_path(task=replace(task, warm_start=replace(task.warm_start, **settings, first_lesson=lesson)))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    assert path.name.startswith("long_tailed_sums-")
    assert model.config.max_position_embeddings == 128
    assert model.config.vocab_size == len(tokenizer) == 10 + 20 + 56 + len("+=") + 2
    assert tokenizer.decode(tokenizer(COUNTDOWN + "=j5")["input_ids"]) == COUNTDOWN + "=j5"
