"""TRL's rewards by name: which answers are right, and what they make of any text and any column."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from math_verify import verify
from trl.rewards import accuracy_reward, accuracy_rewards

from bapo_trl.script.rewards import resolve_reward_funcs


ACCURACY, REASONING, FORMAT = resolve_reward_funcs(
    ["accuracy_reward", "reasoning_accuracy_reward", "think_format_reward"]
)

PIECES = [
    *"0159.,-+=/^_(){}[]$%&x", " ", "\n", r"\boxed{", "}", r"\frac", r"\sqrt", r"\text{", r"\pm", r"\infty", r"\le",
    r"\[", r"\]", r"\left", r"\begin{pmatrix}", r"\\", r"\end{pmatrix}", "answer: ", "1e9999999", "</think>",
]  # fmt: skip
TEXTS = st.text(max_size=20) | st.lists(st.sampled_from(PIECES), max_size=8).map("".join)
ANSWERS = [
    "5", "5.", "5 km", "x = 5", "5\\%", r"\frac{1}{2}", "0.5", r"2\sqrt{3}", "2", "(1, 2)", "x^2+1", r"so \boxed{5}",
    "So 1 and 4\n#### 5", "$5$",
]  # fmt: skip


def boxed(answer):
    return rf"So it is \boxed{{{answer}}}."


def rewards(reward, text, solution):
    return reward([text], solution=[solution])[0]


def trls(text, solution):
    return accuracy_reward([[{"role": "assistant", "content": text}]], solution=[solution])[0]


@pytest.mark.parametrize(
    ("solution", "right", "wrong"),
    [
        ("5.", "5", "4"),
        ("5 dollars.", "5", "6"),
        ("**5**", "5", "55"),
        ("1 + 4 = 5", "5", "1"),
        ("Adding gives x = 5", "5", "x"),
        (r"3 \pmod{7}", "3", "7"),
        (0.00001, "0.00001", "1"),
        (0.00001, "10^{-5}", "-5"),
        # What TRL reads as 2, 2 and not at all
        (r"2\sqrt{3}", r"2\sqrt{3}", r"\sqrt{3}"),
        ("(1, 2)", "(1, 2)", "(2, 1)"),
        ("x^2+1", "x^2+1", "x^2"),
        ('["x^2+1.", "7"]', "7", "8"),
        (["5", None], "5", "None"),
        # As in Skywork-OR1: the text of the list itself is no answer, in which TRL would find a 2
        ('["(1, 2)"]', "(1, 2)", "2"),
        (r'["3 + 2\\sqrt{2}", "7"]', r"3 + 2\sqrt{2}", "2"),
    ],
)
def test_an_answer_is_right_as_it_stands_and_as_trl_reads_it(solution, right, wrong):
    assert rewards(ACCURACY, boxed(right), solution) == 1
    assert rewards(REASONING, f"</think>{boxed(right)}", solution) == 1
    assert rewards(ACCURACY, boxed(wrong), solution) == 0


def test_the_punishment_for_length_begins_in_the_last_fifth():
    (overlong,) = resolve_reward_funcs(["get_soft_overlong_punishment"], 100)
    assert overlong(completion_ids=[[7] * length for length in (3, 80, 90, 100)]) == [0, 0, -0.5, -1]
    with pytest.raises(ValueError, match="`max_completion_length` is not set: set it"):
        resolve_reward_funcs(["get_soft_overlong_punishment"], None)
    assert len(resolve_reward_funcs(["think_format_reward"], None)) == 1


@pytest.mark.parametrize("solution", [None, math.nan, "", [], [None], {"a": 5}])
@pytest.mark.parametrize("answer", ["5", "None", "nan", ""])
def test_without_an_answer_to_compare_with_there_is_no_reward(solution, answer):
    assert rewards(ACCURACY, boxed(answer), solution) is None
    assert rewards(REASONING, boxed(answer), solution) is None


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (boxed("78"), 1),
        ("The answer is $78$.", 1),
        (r"Answer: \[78\]", 1),
        (r"the final answer is \(78\)", 1),
        ("$78$", 0),
        (r"\[78\]", 0),
        ("The answer is 78.", 0),
    ],
)
def test_where_an_answer_may_stand(text, reward):
    """As docs/evaluation.md says."""
    assert rewards(ACCURACY, text, "78") == trls(text, "78") == reward


def assert_as_good_as_trls(text, solution):
    assert rewards(ACCURACY, text, solution) in {1: (1,), 0: (0, 1), None: (None, 0, 1)}[trls(text, solution)]


@pytest.mark.fuzz
def test_what_trl_rewards_is_rewarded():
    for solution, answer in itertools.product(ANSWERS, repeat=2):
        assert_as_good_as_trls(boxed(answer), solution)


@pytest.mark.fuzz
@settings(max_examples=100, derandomize=True)
@given(TEXTS, TEXTS, st.sampled_from(["{}", boxed("{}"), "answer: ${}$"]))
def test_what_trl_rewards_of_any_text_is_rewarded(solution, answer, form):
    assert_as_good_as_trls(form.replace("{}", answer), solution)


@pytest.mark.fuzz
@settings(max_examples=100, derandomize=True)
@given(TEXTS, st.none() | st.floats() | st.integers() | TEXTS | st.lists(st.none() | TEXTS, max_size=2))
def test_no_text_and_no_column_makes_a_reward_fail(text, solution):
    for reward in (ACCURACY, REASONING):
        assert rewards(reward, text, solution) in (None, 0, 1)
    assert FORMAT([text]) in ([0.0], [1.0])


@pytest.mark.parametrize("message", [{"role": "assistant"}, {"role": "assistant", "content": None}])
def test_a_call_of_a_tool_without_text_is_not_right(message):
    assert (
        ACCURACY([[message]], solution=["5"]) == REASONING([[message]], solution=["5"]) == FORMAT([[message]]) == [0]
    )


def test_what_takes_too_long_to_compare_is_not_right(monkeypatch):
    def for_a_second(gold, answer, timeout_seconds):
        return verify(gold, answer, timeout_seconds=1)

    monkeypatch.setattr(accuracy_rewards, "verify", for_a_second)
    assert rewards(ACCURACY, boxed("9^{9^{9}}"), 5) == 0


def test_the_table_of_completions_shows_what_was_compared():
    columns = {}
    ACCURACY([boxed("5"), boxed("x^2+1"), "?"], solution=["5", "x^2+1", None], log_extra=columns.__setitem__)
    assert columns["solution"] == ["5", r"\boxed{x^2+1}", None]
    assert columns["answer_parsed"] == ["[5, '5']", "[x**2 + 1, 'x^2+1']", None]
