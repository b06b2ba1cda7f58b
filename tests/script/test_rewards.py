"""TRL's rewards by name: which answers are right, and what they make of any text and any column."""

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from math_verify import verify
from trl.rewards import accuracy_reward, accuracy_rewards

from bapo_trl.evaluation.answers import gold_answers
from bapo_trl.script.rewards import resolve_reward_funcs


ACCURACY, REASONING, FORMAT = resolve_reward_funcs(
    ["accuracy_reward", "reasoning_accuracy_reward", "think_format_reward"]
)

PIECES = [
    *"0159.,-+=^_(){}[]$%&x", " ", "\n", r"\boxed{", "}", r"\frac", r"\sqrt", r"\text{", r"\pm", r"\infty", r"\le",
    r"\[", r"\]", r"\left", r"\begin{pmatrix}", r"\\", r"\end{pmatrix}", "answer: ", "1e9999999", "</think>",
]  # fmt: skip
TEXTS = st.text(max_size=20) | st.lists(st.sampled_from(PIECES), max_size=8).map("".join)
FIVE = ["5", "5.", "5 km", "x = 5", "5\\%", r"so \boxed{5}", "So 1 and 4\n#### 5", "$5$", "5 cm^2", "5 m/s", "**5**"]
HALF = [r"\frac{1}{2}", r"\frac12", "0.5", "1/2", "1/2 of the cake", "5e-1"]
ALIKE = [
    FIVE, HALF, ["2"], ["3"], ["10"], ["12", "12."], ["30", "30 minutes"], ["3.5", r"3\frac{1}{2}", "3 1/2", "7/2"],
    [r"2\sqrt{3}"], [r"3\pi", "3π"], ["100000", "10^{5}", "100,000", "1e5"], ["(1, 2)"], ["[1, 2)"], ["x^2+1"],
    ["2x+1"], ["y = 2x + 1"], ["x + 2y = 5"], ["x^2 + y^2 = 10"], ["5 + 3i"], ["1, 2", "1 and 2", r"\{1, 2\}"],
    [r"\pm 2"], ["1024", "2^{10}"], ["2:3"], ["12:30"], ["1 hour 30 minutes"], ["x > 3"], [r"10 \bmod 3"], ["6", "3!"],
    [r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"], [r"\frac{3}{5}\pi"], ["90", r"90^\circ", "90°"], ["Paris"],
]  # fmt: skip
"""Right answers as data sets write them, those that are the same in a list; a completion has the first of it."""


def boxed(answer):
    return rf"So it is \boxed{{{answer}}}."


def rewards(reward, text, solution):
    return reward([text], solution=[solution])[0]


def trls(text, solution):
    return accuracy_reward([[{"role": "assistant", "content": text}]], solution=[solution])[0]


@pytest.mark.parametrize(
    ("solution", "right", "wrong"),
    [
        # As in AIME, GSM8K, and columns of numbers
        ("073", "73", "74"),
        (r"\boxed{1}", "1", "2"),
        ("They are <<3=3>>3.\n#### 3", "3", "4"),
        (73, "073", "7"),
        ("5.", "5", "4"),
        ("5 dollars.", "5", "6"),
        ("**5**", "5", "55"),
        ("1 + 4 = 5", "5", "1"),
        ("Adding gives x = 5", "5", "x"),
        (r"3 \pmod{7}", "3", "7"),
        (0.00001, "0.00001", "1"),
        (0.00001, "10^{-5}", "-5"),
        # What TRL reads as 2, 2, 3, 10 and not at all
        (r"2\sqrt{3}", r"2\sqrt{3}", "2"),
        ("(1, 2)", "(1, 2)", "2"),
        (r"3\pi", r"3\pi", "3"),
        ("10^{5}", "100000", "10"),
        ("x^2+1", "x^2+1", "1"),
        # Prose: what stands between its words
        ("The sum of 1 and 4 is 5", "5", "4"),
        ("48/2 = 24 in May, 48 + 24 = 72 in all", "72", "24"),
        ("The answer is $2\\sqrt{3}$.", r"2\sqrt{3}", "2"),
        ("The interval is (1, 2)", "The interval is (1, 2)", "2"),
        ("The roots are 2 and 3", "The roots are 2 and 3", "3"),
        ("It takes 1 hour 30 minutes", "It takes 1 hour 30 minutes", "30"),
        ("3 cm by 4 cm", "3 cm by 4 cm", "4"),
        ("1 out of 5", "1 out of 5", "5"),
        ("€1 000", "1000", "1"),
        ("x = 2 or x = 3", "2, 3", "3"),
        ("f(2) = 5", "5", "2"),
        ("3 (mod 7)", "3 (mod 7)", "7"),
        ("5 米", "5", "6"),
        ("the point (3, 4)", "(3, 4)", "4"),
        ("The ratio is 2:3", "2:3", "2"),
        ("The value is - 5", "-5", "5"),
        ("It takes 5 and a half hours", "5 and a half hours", "5"),
        ("3 remainder 2", "3 remainder 2", "2"),
        ("half of 10", "half of 10", "10"),
        ("negative 5", "negative 5", "5"),
        ("f(x) = x + 1", "f(x) = x + 1", "1"),
        (r"2\text{ hours }30\text{ minutes}", r"2\text{ hours }30\text{ minutes}", "2"),
        # Numbers that TRL reads otherwise: as 0, 3 and, where Python's digits may have `_` between them, 10102
        (r"1\,000", "1000", "0"),
        ("1000", r"1\,000", r"1\,001"),
        (r"3\mathrm{i}", "3i", "3"),
        ("5+3i", r"5+3\mathrm{i}", "8"),
        (r"5~\mathrm{cm}^2", "5", "2"),
        ("10**5", "100000", "10"),
        ("1010_2", "1010_2", "10102"),
        (".5", "0.5", "5"),
        (r"x \approx 3.14", "3.14", "3"),
        (r"\approx 3.14", "3.14", "3"),
        # What TRL cannot parse, and takes a number of
        ("x² + 1", "x² + 1", "1"),
        ("<1, 2>", "<1, 2>", "2"),
        ("3 · 4", "3 · 4", "4"),
        ("3 × 4", "12", "4"),
        ("≥ 3", "≥ 3", "3"),
        ("17 r. 3", "17 r. 3", "3"),
        (r"\boxed{3 \times 3 grids}", r"3 \times 3 grids", "3"),
        (r"\begin{cases}x=1\\y=2\end{cases}", r"\begin{cases}x=1\\y=2\end{cases}", "2"),
        ('["x^2+1.", "7"]', "7", "8"),
        (["5", None], "5", "None"),
        # As in Skywork-OR1: the text of the list itself is no answer, in which TRL would find a 2
        ('["(1, 2)"]', "(1, 2)", "2"),
        ('["\\\\frac{1}{2}"]', r"\frac{1}{2}", "2"),
        ('["7", "8"]', "8", "9"),
        (r'["3 + 2\\sqrt{2}", "7"]', r"3 + 2\sqrt{2}", "2"),
    ],
)
def test_an_answer_is_right_as_it_stands_and_as_trl_reads_it(solution, right, wrong):
    assert rewards(ACCURACY, boxed(right), solution) == 1
    assert rewards(REASONING, f"</think>{boxed(right)}", solution) == 1
    assert rewards(ACCURACY, boxed(wrong), solution) == 0
    assert rewards(ACCURACY, [{"role": "assistant", "content": boxed(right)}], solution) == 1


def test_rewards_by_import_path(tmp_path, monkeypatch):
    (tmp_path / "own_rewards.py").write_text("def one(completions, **kwargs):\n    return [1.0]\n")
    monkeypatch.chdir(tmp_path)
    think, own = resolve_reward_funcs(["think_format_reward", "own_rewards.one"])
    assert think is FORMAT
    assert own(["text"]) == [1.0]
    for name in ("no_such_module.reward", "own_rewards.two"):
        with pytest.raises(ValueError, match=f"`reward_funcs` has '{name}', which cannot be imported"):
            resolve_reward_funcs([name])


def test_the_punishment_for_length_begins_in_the_last_fifth():
    (overlong,) = resolve_reward_funcs(["get_soft_overlong_punishment"], 100)
    assert overlong(completion_ids=[[7] * length for length in (3, 80, 90, 100)]) == [0, 0, -0.5, -1]


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


def test_a_part_of_an_answer_is_not_right():
    for answer, *others in ALIKE:
        for solution in (answer, *others):
            assert rewards(ACCURACY, boxed(answer), solution) == 1, solution
            parts = {*re.findall(r"\d+", solution.rpartition("####")[2].replace(",", ""))} - {answer}
            assert {part: rewards(ACCURACY, boxed(part), solution) for part in parts} == dict.fromkeys(parts, 0), (
                solution
            )


@pytest.mark.fuzz
@settings(max_examples=100, derandomize=True)
@given(TEXTS, TEXTS, st.sampled_from(["{}", boxed("{}"), "answer: ${}$"]))
def test_our_rewards_are_also_given_by_trl(solution, answer, form):
    text = form.replace("{}", answer)
    boxes = [boxed(each) for each in gold_answers(solution)]
    if rewards(ACCURACY, text, solution) == 1:
        assert 1 in [trls(text, each) for each in (solution, *boxes)]


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


def test_a_comparison_that_takes_too_long_counts_as_wrong(monkeypatch):
    def for_a_second(gold, answer, timeout_seconds):
        return verify(gold, answer, timeout_seconds=1)

    monkeypatch.setattr(accuracy_rewards, "verify", for_a_second)
    assert rewards(ACCURACY, boxed("9^{9^{9}}"), 5) == 0


def test_the_table_of_completions_shows_the_compared_answers():
    columns = {}
    ACCURACY([boxed("5"), boxed("x^2+1"), "?"], solution=["5", "x^2+1", None], log_extra=columns.__setitem__)
    assert columns["solution"] == ["5", r"\boxed{x^2+1}", None]
    assert columns["answer_parsed"] == ["[5, '5']", "[x**2 + 1, 'x^2+1']", None]
