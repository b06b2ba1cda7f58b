"""The answers in completions and in columns."""

import pytest

from bapo_trl.script.answers import EXTRACTORS, boxed_answer, canonical, gold_answers, whole_text


@pytest.mark.parametrize(
    ("text", "boxed", "number"),
    [
        (r"so \boxed{073}.", "073", "073"),
        (r"\boxed{1} or rather \boxed{\sqrt{x^{2}}}", r"\sqrt{x^{2}}", "2"),
        (r"it goes on: \boxed{\frac{1}{2}", None, "2"),
        ("It costs $12,345.67, or 1,2 or 12345,678", None, "678"),
        ("between 5-3 and -4.", None, "-4"),
        ("5-3", None, "3"),
        ("a half is .5", None, ".5"),
        ("= +5", None, "5"),
        ("none", None, None),
        ("", None, None),
    ],
)
def test_answers_in_completions(text, boxed, number):
    assert boxed_answer(text) == boxed
    assert EXTRACTORS["last_number"](text) == number


def test_the_whole_text_is_an_answer_unless_it_is_empty():
    assert whole_text(" 95\n") == "95"
    assert whole_text(" \n") is None


def test_one_spelling_for_numbers_and_none_for_what_only_looks_like_one():
    assert canonical("073") == canonical(" 73.00") == canonical("+73") == canonical("$73.$") == "73"
    assert canonical("1,234") == "1234"
    assert canonical("1,2") == "1,2"
    assert canonical("1000") == "1000"
    assert canonical("Infinity") == "Infinity"


@pytest.mark.parametrize(
    ("value", "answers"),
    [
        ("073", ["073"]),
        (73, ["73"]),
        (73.0, ["73"]),
        (0.5, ["0.5"]),
        (["1", "2"], ["1", "2"]),
        ('["1/2", "\\\\frac{1}{2}"]', ["1/2", r"\frac{1}{2}"]),
        ("[1, 2]", ["[1, 2]"]),
        ('["A" is here', ['["A" is here']),
        ("12 * 100 = <<12*100=1200>>1,200\n#### 1,200", ["1200"]),
        (r"Since $x=3$, \boxed{1} is out and \boxed{(1, 2)} holds.", ["(1, 2)"]),
        (r"2\sqrt{3}", [r"2\sqrt{3}"]),
    ],
)
def test_answers_in_columns(value, answers):
    assert gold_answers(value) == answers
