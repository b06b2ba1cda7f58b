"""The answers in completions and in columns."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_trl.evaluation.answers import (
    EXTRACTORS,
    boxed_answer,
    canonical,
    gold_answers,
    last_number,
    same_number,
)
from bapo_trl.tasks.gym import read_answer
from bapo_trl.tasks.sums import last_number_reward


# Text of any kind, and text of what answers are made of
PIECES = [*"0123456789.,-+eE\u2212 \n{}$#\\", "1e9999999", "\\boxed{", "<answer>", "</answer>", '["', '"]', "####"]
TEXTS = st.text() | st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(TEXTS, parts, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize(
    ("text", "boxed", "number"),
    [
        (r"so \boxed{073}.", "073", "073"),
        (r"\boxed{1} or rather \boxed{\sqrt{x^{2}}}", r"\sqrt{x^{2}}", "2"),
        (r"it goes on: \boxed{\frac{1}{2}", None, "2"),
        ("It costs $12,345.67, or 1,2 or 12345,678", None, "678"),
        ("between 5-3 and -4.", None, "-4"),
        ("a half is .5", None, ".5"),
        ("= +5", None, "5"),
        ("", None, None),
        ("it is \u22124", None, "-4"),
        ("5\u22123", None, "3"),
        ("about 1e5, or 2.5E-3", None, "2.5E-3"),
        ("1e\u22125", None, "1e-5"),
        ("2e3x", None, "3"),
        (r"\boxed{5} and \boxed{\frac{1}{2}", "5", "2"),
        (r"\boxed{\boxed{5} and on", "5", "5"),
        (r"\boxed{1\boxed{2}3}", "2", "3"),
        (r"} \boxed{5}{ \boxed{ }", None, "5"),
        (r"\boxed{\left\{ 7 \right.}", r"\left\{ 7 \right.", "7"),
    ],
)
def test_answers_in_completions(text, boxed, number):
    assert boxed_answer(text) == boxed
    assert EXTRACTORS["last_number"](text) == number
    assert EXTRACTORS["text"](f" {text}\n ") == (text or None)


@pytest.mark.parametrize(
    ("answers", "spelling"),
    [
        (("073", " 73.00", "+73", "$73.$"), "73"), (("1,234",), "1234"), (("1,2",), "1,2"), (("1010_2",), "1010_2"),
        (("1000",), "1000"), (("Infinity",), "Infinity"), (("\u22125", "-5.0"), "-5"), (("-0", "0e7"), "0"),
        (("1e5", "100,000"), "100000"),
    ],
)  # fmt: skip
def test_numbers_have_one_spelling_and_other_text_has_none(answers, spelling):
    assert {canonical(answer) for answer in answers} == {spelling}


@given(TEXTS, TEXTS)
def test_no_text_makes_an_answer_fail(text, other):
    for extract in EXTRACTORS.values():
        answer = extract(text)
        assert answer is None or isinstance(canonical(answer), str)
    assert same_number(last_number(text), last_number(text)) == (last_number(text) is not None)
    assert isinstance(read_answer(text, other), str)
    assert last_number_reward([text], answer=[other])[0] in (None, 0, 1)


def read_slowly(text):
    """Return the content of the last pair of tags without a closing tag between them, by trying all pairs."""
    opens = [place for place in range(len(text)) if text.startswith("<answer>", place)]
    closed = [place for place in opens if "</answer>" in text[place:]]
    return text[closed[-1] + len("<answer>") :].partition("</answer>")[0].strip() if closed else None


@settings(max_examples=300)
@given(st.lists(st.sampled_from(["<answer>", "</answer>", "1", " ", "<"]), max_size=10).map("".join))
def test_the_last_tags_that_close_hold_the_answer(text):
    expected = read_slowly(text)
    assert read_answer(text, "yes") == (text.strip() if expected is None else expected)


def test_many_open_tags_and_boxes_are_read_in_one_pass():
    """Quadratic time would take hours."""
    assert read_answer("<answer>" * 1_000_000 + "5", "3") == "5"
    assert boxed_answer(r"\boxed{7}" + r"\boxed{" * 1_000_000) == "7"


@pytest.mark.parametrize(
    ("value", "answers"),
    [
        ("073", ["073"]),
        (73, ["73"]),
        (0.5, ["0.5"]),
        (["1", "2"], ["1", "2"]),
        ('["1/2", "\\\\frac{1}{2}"]', ["1/2", r"\frac{1}{2}"]),
        ("[1, 2]", ["[1, 2]"]),
        ('["A" is here', ['["A" is here']),
        ("12 * 100 = <<12*100=1200>>1,200\n#### 1,200", ["1200"]),
        (r"Since $x=3$, \boxed{1} is out and \boxed{(1, 2)} holds.", ["(1, 2)"]),
        (r"2\sqrt{3}", [r"2\sqrt{3}"]),
        (5e-324, [f"0.{'0' * 323}5"]),
        ("5.", ["5"]),
        (["5", None, " "], ["5"]),
        ('["5", [1], null]', ["5"]),
        ("The end. ####", []),
    ],
)
def test_answers_in_columns(value, answers):
    assert gold_answers(value) == answers
