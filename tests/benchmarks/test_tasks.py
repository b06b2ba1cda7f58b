"""The tasks of the studies: their problems, their demonstrations and their rewards."""

import random
from statistics import fmean, pstdev

import pytest

from benchmarks import rambling_totals
from benchmarks.long_tailed_sums import final_sum_reward
from benchmarks.rambling_totals import LIMITS, RIGHT_TOKENS, final_total_reward
from benchmarks.running_totals import final_answer_reward


GROUP = 16


@pytest.fixture(scope="module")
def groups():
    """Return answers of rambling totals, each with a group of completions of the demonstrator."""
    rng = random.Random(1)
    rows = rambling_totals.load_rambling_totals().train_dataset.select(range(1000))
    return [(row["answer"], [rambling_totals.demonstrate(row["prompt"], rng) for _ in range(GROUP)]) for row in rows]


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
    assert rewards == [final_total_reward(completions, [answer] * GROUP) for answer, completions in groups]
    assert 0.1 < fmean(map(fmean, rewards)) < 0.2  # of the demonstrator; the model that it starts makes slips besides


@pytest.mark.parametrize(
    ("reward", "answer", "right", "wrong"),
    [
        (final_answer_reward, "11", ["b7=11#11", "#5#11"], ["#11#5", "11", "#", "#11 ", ""]),
        (final_total_reward, "22", ["b11c20d21e22", "e22"],
         ["b11c20d21", "22", "b11e22d21e12T.", "b11c20d21e2", "e22T", ""]),
        # The filler need not count right
        (final_sum_reward, "j5", ["=j5", "AA=j5", "CCBBAA=j5", "CAB=j5", "}=j5", "AA..=j5"],
         ["j5", "AAj5", "AA=j5A", "AA=Aj5", "AA==j5", "=j", "=j55", "AAAA", "=", "", "=j5=j5", "a=j5", "A =j5"]),
    ],
)  # fmt: skip
def test_only_a_right_answer_at_the_end_is_rewarded(reward, answer, right, wrong):
    completions = right + wrong
    rewards = reward(completions, answer=[answer] * len(completions), prompts=[""] * len(completions))
    assert rewards == [1.0] * len(right) + [0.0] * len(wrong)
