"""The hard task of the stability study: its problems, its demonstrations and its reward."""

import random
import re

from benchmarks import running_totals
from benchmarks.running_totals import final_answer_reward, load_running_totals


def chain_of(digits):
    """Running totals as a right completion has them, written out the slow way."""
    total, text = digits[0], ""
    for label, digit in zip("bcdefg", digits[1:], strict=True):
        total += digit
        text += f"{label}{digit}={total}"
    return f"{text}#{total}"


def test_running_totals_are_right_and_held_out_problems_are_new():
    task = load_running_totals(seed=0)
    train, test = task.train_dataset["prompt"][:], task.test_dataset["prompt"][:]
    assert (len(set(train)), len(set(test)), set(train) & set(test)) == (8192, 512, set())
    for row in [*task.train_dataset, *task.test_dataset]:
        digits = re.fullmatch("".join(f"{label}([1-9])" for label in "abcdefg") + "=", row["prompt"]).groups()
        assert row["answer"] == str(sum(map(int, digits)))
    assert load_running_totals(seed=0).train_dataset["prompt"][:] == train
    assert load_running_totals(seed=1).train_dataset["prompt"][:] != train


def test_demonstrations_without_detours_are_right_and_on_detours_every_carry_is_forgotten(monkeypatch):
    monkeypatch.setattr(running_totals, "DETOUR_RATE", 0.0)
    monkeypatch.setattr(running_totals, "MARKS", "=")
    monkeypatch.setattr(running_totals, "FORGOTTEN_CARRY_RATES", {True: 1.0, False: 0.0})
    prompt, digits = "a4b7c9d1e1f1g9=", [4, 7, 9, 1, 1, 1, 9]
    right = running_totals.demonstrate(prompt, random.Random(0))
    assert right == chain_of(digits) == "b7=11c9=20d1=21e1=22f1=23g9=32#32"
    assert final_answer_reward([right], answer=["32"]) == [1.0]
    monkeypatch.setattr(running_totals, "DETOUR_RATE", 1.0)
    wrong = running_totals.demonstrate(prompt, random.Random(0))
    totals = zip(["b7", "c9", "d1", "e1", "f1", "g9"], [1, 0, 1, 2, 3, 2], strict=True)
    assert wrong == "".join(f"{step}??????={total}" for step, total in totals) + "#2"
    assert final_answer_reward([wrong], answer=["32"]) == [0.0]


def test_demonstrations_are_of_the_alphabet_and_end_before_the_cap():
    task, rng = load_running_totals(), random.Random(1)
    prompts = task.train_dataset["prompt"][:]
    demonstrations = [task.warm_start.demonstrate(prompt, rng) for prompt in prompts]
    assert max(map(len, demonstrations)) < task.max_new_tokens
    assert set("".join(demonstrations + prompts)) == set(running_totals.ALPHABET)


def test_only_the_text_after_the_last_mark_is_checked():
    completions = ["b7=11#11", "#5#11", "#11#5", "11", "#", "#11 ", ""]
    rewards = final_answer_reward(completions, answer=["11"] * 7, prompts=[""] * 7)
    assert rewards == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
