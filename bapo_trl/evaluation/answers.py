"""The answer in a completion, the answers that a column holds, and whether two are the same number."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal, InvalidOperation
from numbers import Number
from typing import Any


Text = str | Sequence[Mapping[str, Any]]
"""A completion as TRL hands it to rewards: text, or the messages of a conversation."""

MINUS = "\N{MINUS SIGN}"  # of typeset text, which counts as a hyphen does
_THOUSANDS = r"\d{1,3}(?:,\d{3})+"
_EXPONENT = rf"[eE][-+{MINUS}]?\d+(?!\w|\.\d)"
NUMBER = re.compile(
    rf"(?:(?<![\w.)])[-{MINUS}])?(?:(?:{_THOUSANDS}(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)(?:{_EXPONENT})?"
)
_EXACT = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN)  # the usual one rounds to 28 digits
_BRACES = re.compile(r"\\boxed\{|\\\\|\\[{}]|[{}]")


def completion_text(completion: Text) -> str:
    """Return a completion's text: that of its last message in a conversation, which a call of a tool has not."""
    return completion if isinstance(completion, str) else completion[-1].get("content") or ""


def boxed_answer(text: str) -> str | None:
    r"""
    Return what the last closed `\boxed{...}` holds, or `None` if there is none or it is empty.

    Braces that are to be seen, `\{` and `\}`, close nothing.
    """
    opened: list[int | None] = []  # for each open brace, where the content of its box begins, if it is one
    begin = end = 0
    for brace in _BRACES.finditer(text):
        if brace[0] in (r"\boxed{", "{"):
            opened.append(brace.end() if brace[0] == r"\boxed{" else None)
        elif brace[0] == "}" and opened and (start := opened.pop() or 0) > begin:
            begin, end = start, brace.start()
    return text[begin:end].strip() or None


def last_number(text: str) -> str | None:
    """
    Return the last number of a text, without commas between thousands and with a hyphen for a minus, or `None`.

    A minus belongs to the number unless it stands right behind a letter, a digit, a period or a closing bracket.

    Example:

    ```python
    >>> last_number("59 + 19 = 78."), last_number("It is -1,234.50 m."), last_number("5-3"), last_number("none")
    ('78', '-1234.50', '3', None)

    ```
    """
    numbers = NUMBER.findall(text)
    return without_separators(numbers[-1].replace(MINUS, "-")) if numbers else None


EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "boxed": boxed_answer,
    "last_number": last_number,
    "text": lambda text: text.strip() or None,
}
"""Ways to find the answer in a completion, by name."""


def without_separators(number: str) -> str:
    """Return a number without commas between thousands; any other text as it is."""
    is_number = re.fullmatch(rf"[-+]?{_THOUSANDS}(?:\.\d+)?(?:{_EXPONENT})?", number)
    return number.replace(",", "") if is_number else number


def plain_number(text: str) -> str | None:
    """
    Return the one spelling of a number, all its digits kept, or `None` for what is none.

    Numbers of 1000 places and more keep an exponent: written out, a short one could fill the memory.
    """
    try:
        number = Decimal(without_separators(text.replace(MINUS, "-")))
    except InvalidOperation:
        return None
    if not number.is_finite() or "_" in text:  # 101_2 is binary, not Python's way to write 1012
        return None
    number = number.normalize(_EXACT)
    if not number:
        return "0"
    return f"{number:f}" if abs(number.adjusted()) < 1000 else str(number)


def same_number(first: str | None, second: str | None) -> bool:
    """Tell whether two texts are the same number; no number equals none."""
    return first is not None and second is not None and plain_number(first) == plain_number(second) is not None


def canonical(answer: str) -> str:
    r"""
    Return one spelling for answers that differ in spaces, dollar signs, a final period or the way a number is written.

    Example:

    ```python
    >>> [canonical(answer) for answer in ("073", "$73$", "73.0", r"\frac{1}{2}", r"\frac{1} {2}.")]
    ['73', '73', '73', '\\frac{1}{2}', '\\frac{1}{2}']

    ```
    """
    text = re.sub(r"\s", "", answer).strip("$").removesuffix(".")
    return plain_number(text) or text


def gold_texts(value: Any) -> list[str]:
    """
    Return the texts of right answers that a column's value holds; none if it is missing.

    Text may be a JSON list of strings (as in Skywork-OR1's `ground_truth`). A number is written out, one that is whole
    without decimals. `None`, NaN and empty text are missing, and so is what is neither text nor number.

    Example:

    ```python
    >>> gold_texts(73.0), gold_texts(0.00001), gold_texts('["1/2", "0.5"]'), gold_texts(None)
    (['73'], ['0.00001'], ['1/2', '0.5'], [])

    ```
    """
    if isinstance(value, str) and value.lstrip().startswith('["'):  # strings: [1, 2] is an interval
        with suppress(ValueError):
            value = json.loads(value)
    parts = value if isinstance(value, (list, tuple)) else [value]
    return [text for part in parts if (text := _as_text(part))]


def gold_answers(value: Any) -> list[str]:
    r"""
    Return the answers that a column's value stands for; any of them is right. None for a value that is missing.

    Of each of its [`gold_texts`], the text after `####` (as in GSM8K) and the last `\boxed{...}` of a worked solution
    are understood. Any other text is itself the answer.
    """
    answers = []
    for text in gold_texts(value):
        answer = text.rpartition("####")[2]
        answers.append(without_separators(boxed_answer(answer) or answer.strip().removesuffix(".")))
    return [answer for answer in answers if answer]


def _as_text(value: Any) -> str | None:
    if isinstance(value, Number) and not isinstance(value, bool):
        return plain_number(str(value))
    return str(value).strip() if isinstance(value, (str, bool)) else None
