"""avg@k, pass@k and maj@k against direct counts by their definitions."""

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_trl.evaluation.accuracy import (
    PromptResult,
    majority_vote,
    mean_over_prompts,
    pass_at_k,
    summarize,
)


def pass_at_k_counted(correct: list[bool], k: int) -> float:
    """Draw every k of the samples, and count the draws with a right one."""
    draws = list(itertools.combinations(correct, k))
    return sum(any(draw) for draw in draws) / len(draws)


def majority_counted(answers, correct) -> float:
    """Average correctness over all completions whose answer is among the most frequent ones."""
    voters = [(answer, right) for answer, right in zip(answers, correct, strict=True) if answer is not None]
    counts = [sum(other == answer for other, _ in voters) for answer, _ in voters]
    winners = [right for (_, right), count in zip(voters, counts, strict=True) if count == max(counts)]
    return statistics.mean(map(float, winners)) if winners else 0.0


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(correct, data):
    k = data.draw(st.integers(1, len(correct)))
    assert pass_at_k(len(correct), sum(correct), k) == pytest.approx(pass_at_k_counted(correct, k), abs=1e-12)


@given(st.lists(st.tuples(st.sampled_from([None, "1", "2", "3"]), st.booleans()), min_size=1, max_size=9))
def test_the_majority_is_that_of_the_completions_counted(votes):
    answers, correct = zip(*votes, strict=True)
    assert majority_vote(answers, correct) == pytest.approx(majority_counted(answers, correct))


def test_the_error_is_over_prompts_and_never_zero():
    # population variance (0.25 + 0.25 + 0 + 0) / 4 = 0.125 over 4 prompts; 1 + 1 / n = 1.25
    estimate = mean_over_prompts([0.0, 1.0, 0.5, 0.5])
    assert estimate.mean == 0.5
    assert estimate.error == pytest.approx(math.sqrt(0.125 / 4 + 1 / 64) / 1.25)
    assert mean_over_prompts([0.0] * 9).error == mean_over_prompts([1.0] * 9).error == pytest.approx(0.05)
    assert math.isnan(mean_over_prompts([1.0]).error)


def test_summary_by_source():
    results = [
        PromptResult((True, False, False), ("1", "2", "2"), "aime"),
        PromptResult((True, True, False), ("3", "3", "4"), "gsm8k"),
        PromptResult((False, False, False), (None, None, "5"), "gsm8k"),
    ]
    means = {name: round(estimate.mean, 4) for name, estimate in summarize(results).items()}
    assert means == {
        "avg@3": 0.3333, "pass@2": 0.5556, "pass@3": 0.6667, "maj@3": 0.3333,
        "avg@3/aime": 0.3333, "pass@2/aime": 0.6667, "pass@3/aime": 1.0, "maj@3/aime": 0.0,
        "avg@3/gsm8k": 0.3333, "pass@2/gsm8k": 0.5, "pass@3/gsm8k": 0.5, "maj@3/gsm8k": 0.5,
    }  # fmt: skip
    # pass@2: 1 - C(2,2)/C(3,2) = 2/3; 1 - 0/3 = 1; 0
