"""The task of the study of few positive tokens: its problems, its reward, and what the limit of the length sets."""

import random
import re
from statistics import fmean, pstdev

import pytest

from benchmarks import rambling_totals
from benchmarks.rambling_totals import LIMITS, RIGHT_TOKENS, demonstrate, final_total_reward, load_rambling_totals


GROUP = 16


@pytest.fixture(scope="module")
def task():
    return load_rambling_totals()


@pytest.fixture(scope="module")
def groups(task):
    """Answers, each with a group of completions of the demonstrator."""
    rng = random.Random(1)
    rows = task.train_dataset.select(range(1000))
    return [(row["answer"], [demonstrate(row["prompt"], rng) for _ in range(GROUP)]) for row in rows]


def test_totals_are_right_and_held_out_problems_are_new(task):
    train, test = task.train_dataset["prompt"][:], task.test_dataset["prompt"][:]
    assert (len(set(train)), len(set(test)), set(train) & set(test)) == (8192, 512, set())
    for row in [*task.train_dataset, *task.test_dataset]:
        digits = re.fullmatch("".join(f"{label}([1-9])" for label in "abcde") + "=", row["prompt"]).groups()
        assert row["answer"] == f"{sum(map(int, digits)):02}"
    assert load_rambling_totals(seed=1).train_dataset["prompt"][:] != train


def test_an_error_is_followed_by_a_ramble_and_nothing_else_is(monkeypatch):
    prompt = "a4b7c9d1e1="
    assert rambling_totals.add(prompt, random.Random(0)) == "b11c20d21e22"
    monkeypatch.setattr(rambling_totals, "FORGOTTEN_CARRY_RATE", 1.0)
    assert re.fullmatch(r"b01T[.,!?]{5}S[.,!?]{5}R.*A[.,!?]{5}", demonstrate(prompt, random.Random(0)))
    assert demonstrate("a1b1c1d1e1=", random.Random(0)) == "b02c03d04e05"


def test_demonstrations_are_of_the_alphabet_and_fit_the_model(task, groups):
    warm_start = task.warm_start
    texts = [text for _, completions in groups for text in completions] + task.train_dataset["prompt"][:]
    assert set("".join(texts)) == set(warm_start.alphabet)
    assert max(map(len, texts)) + len("a1b1c1d1e1=") < warm_start.model["max_position_embeddings"]


def test_only_the_last_total_is_rewarded():
    completions = ["b11c20d21e22", "e22", "b11c20d21", "22", "b11e22d21e12T.", "b11c20d21e2", "e22T", ""]
    assert final_total_reward(completions, answer=["22"] * 8, prompts=[""] * 8) == [1.0, 1.0] + [0.0] * 6


@pytest.mark.parametrize("contribution", LIMITS)
def test_the_limit_sets_the_positive_contribution_and_nothing_else(groups, contribution):
    """Cut as generation cuts; advantages as GRPO has them; each token weighs as much as any other."""
    limit, masses, rewards = LIMITS[contribution], [0.0, 0.0], []
    for answer, completions in groups:
        found = final_total_reward([text[:limit] for text in completions], [answer] * GROUP)
        tokens = [min(len(text) + 1, limit) for text in completions]  # with the end token, where it comes in time
        for reward, length in zip(found, tokens, strict=True):
            if spread := pstdev(found):
                masses[reward == 0] += length * abs(reward - fmean(found)) / spread
        assert {length for length, reward in zip(tokens, found, strict=True) if reward} <= {RIGHT_TOKENS}
        rewards.append(found)
    assert masses[0] / sum(masses) == pytest.approx(contribution, abs=0.01)
    uncut = [final_total_reward(completions, [answer] * GROUP) for answer, completions in groups]
    assert rewards == uncut
    assert 0.1 < fmean(map(fmean, rewards)) < 0.2  # of the demonstrator; the model that it starts makes slips besides


def test_no_first_token_tells_whether_a_completion_will_be_right(groups):
    assert {text[0] for _, completions in groups for text in completions} == {"b"}
