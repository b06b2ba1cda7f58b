"""TRL's rewards by name: which answers are right, and what they make of any text and any column."""

import math
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trl.rewards import accuracy_reward

from bapo_trl.errors import InputError
from bapo_trl.script.rewards import resolve_reward_funcs
from tests.evaluation.golds import ALIKE, DIFFERENT, GOLDS


ACCURACY, REASONING, FORMAT = resolve_reward_funcs(
    ["accuracy_reward", "reasoning_accuracy_reward", "think_format_reward"]
)

PIECES = [
    *"0159.,-+=^_(){}[]$%&x", " ", "\n", r"\boxed{", "}", r"\frac", r"\sqrt", r"\text{", r"\pm", r"\infty", r"\le",
    r"\[", r"\]", r"\left", r"\begin{pmatrix}", r"\\", r"\end{pmatrix}", "answer: ", "1e9999999", "</think>",
]  # fmt: skip
TEXTS = st.text(max_size=20) | st.lists(st.sampled_from(PIECES), max_size=8).map("".join)
SLOW = [
    r"9^{9^{9^9}}", "9^{9^9}", "(10^{10^{10}})!", r"\binom{10^{10}}{10^9}", "1000000000!", r"\prod_{n=1}^{10^9} n",
    "(x+1)^{5000}", "x^{10^9}", "((" * 400 + "1", "9" * 5000 + "^{9999}", r"\text{" * 500 + "}" * 500,
]  # fmt: skip


def boxed(answer):
    return rf"So it is \boxed{{{answer}}}."


def rewards(reward, text, solution):
    return reward([text], solution=[solution])[0]


def trls(text, solution):
    return accuracy_reward([[{"role": "assistant", "content": text}]], solution=[solution])[0]


def test_an_answer_is_right_if_it_is_the_same():
    assert len(GOLDS) > 200
    assert {gold: rewards(ACCURACY, boxed(gold), gold) for gold in GOLDS} == dict.fromkeys(GOLDS, 1)


def test_letters_units_times_and_dates_are_not_mathematics():
    pairs = [*DIFFERENT, *(pair[::-1] for pair in DIFFERENT if pair != ("12:30", "2:5"))]  # 2:5 may be a ratio
    assert [pair for pair in pairs if rewards(ACCURACY, boxed(pair[1]), pair[0])] == []
    assert rewards(ACCURACY, r"The answer is $5\text{ s}$", "5 m") == rewards(ACCURACY, "answer: $ABCD$", "BADC") == 0
    assert rewards(ACCURACY, "answer: $BADC$", "BADC") == 1


def test_other_spellings_of_an_answer_are_right():
    assert [pair for pair in ALIKE if rewards(ACCURACY, boxed(pair[1]), pair[0]) != 1] == []


@pytest.mark.parametrize("in_main_thread", [True, False])
def test_no_comparison_takes_long(in_main_thread):
    seconds = {}

    def judge():
        rewards(ACCURACY, boxed("1"), "x")  # loads sympy
        for gold in ("5", r"\frac{1}{2}", "x+1"):
            for answer in SLOW:
                start = time.thread_time()  # other processes do not count
                assert rewards(ACCURACY, boxed(answer), gold) == 0
                assert rewards(ACCURACY, boxed(answer), answer) == 1
                seconds[gold, answer] = time.thread_time() - start

    if in_main_thread:
        judge()
    else:
        thread = threading.Thread(target=judge)
        thread.start()
        thread.join()
    assert len(seconds) == 3 * len(SLOW)
    assert max(seconds.values()) < 1


@pytest.mark.parametrize(
    ("solution", "right", "wrong"),
    [
        # As in AIME, GSM8K, and columns of numbers
        ("073", "73", "74"),
        (r"\boxed{1}", "1", "2"),
        ("They are <<3=3>>3.\n#### 3", "3", "4"),
        (73, "073", "7"),
        ("5.", "5", "4"),
        (0.00001, "0.00001", "1"),
        (0.00001, "10^{-5}", "-5"),
        (r"Since $x=3$, \boxed{BADC} holds.", "badc", "ABCD"),
        # As in Skywork-OR1
        ('["x^2+1.", "7"]', "7", "8"),
        (["5", None], "5", "None"),
        ('["(1, 2)"]', "(1, 2)", "2"),
        ('["\\\\frac{1}{2}"]', r"\frac{1}{2}", "2"),
        (r'["3 + 2\\sqrt{2}", "7"]', r"3 + 2\sqrt{2}", "2"),
    ],
)
def test_the_right_answer_in_a_column(solution, right, wrong):
    assert rewards(ACCURACY, boxed(right), solution) == 1
    assert rewards(REASONING, f"</think>{boxed(right)}", solution) == 1
    assert rewards(REASONING, boxed(right), solution) == 0
    assert rewards(ACCURACY, boxed(wrong), solution) == 0
    assert rewards(ACCURACY, [{"role": "assistant", "content": boxed(right)}], solution) == 1


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
    """As docs/evaluate.md says."""
    assert rewards(ACCURACY, text, "78") == trls(text, "78") == reward


@pytest.mark.fuzz
@settings(max_examples=100, derandomize=True)
@given(TEXTS, st.none() | st.floats() | st.integers() | TEXTS | st.lists(st.none() | TEXTS, max_size=2))
def test_no_text_and_no_column_makes_a_reward_fail(text, solution):
    for reward in (ACCURACY, REASONING):
        assert rewards(reward, text, solution) in (None, 0, 1)
    assert FORMAT([text]) in ([0.0], [1.0])


def test_a_name_that_is_no_function_is_rejected():
    with pytest.raises(InputError, match=r"`reward_funcs` has 'math\.pi', which is no function but float"):
        resolve_reward_funcs(["math.pi"])
