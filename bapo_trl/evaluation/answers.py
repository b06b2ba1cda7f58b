"""Extract answers from completions and dataset columns, and compare them as numbers."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal, InvalidOperation
from numbers import Number
from typing import Any


Text = str | Sequence[Mapping[str, Any]]
"""A completion as TRL passes it to reward functions: text, or the messages of a conversation."""

MINUS = "\N{MINUS SIGN}"  # in typeset text; treated like a hyphen
_THOUSANDS = r"\d{1,3}(?:,\d{3})+"
_EXPONENT = rf"[eE][-+{MINUS}]?\d+(?!\w|\.\d)"
NUMBER = re.compile(
    rf"(?:(?<![\w.)])[-{MINUS}])?(?:(?:{_THOUSANDS}(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)(?:{_EXPONENT})?"
)
_EXACT = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN)  # the default context rounds to 28 digits
_BRACES = re.compile(r"\\boxed\{|\\\\|\\[{}]|[{}]")


def completion_text(completion: Text) -> str:
    """Return the text of a completion or of its last message; empty if the message is only a tool call."""
    return completion if isinstance(completion, str) else completion[-1].get("content") or ""


def boxed_answer(text: str) -> str | None:
    r"""
    Return the content of the last closed `\boxed{...}`, or `None` if there is no box or it is empty.

    Escaped braces, `\{` and `\}`, do not count as braces.
    """
    opened: list[int | None] = []  # for each open brace, the start of the box's content; `None` for other braces
    begin = end = 0
    for brace in _BRACES.finditer(text):
        if brace[0] in (r"\boxed{", "{"):
            opened.append(brace.end() if brace[0] == r"\boxed{" else None)
        elif brace[0] == "}" and opened and (start := opened.pop() or 0) > begin:
            begin, end = start, brace.start()
    return text[begin:end].strip() or None


def last_number(text: str) -> str | None:
    """
    Return the last number in a text, without thousands separators and with a hyphen as minus, or `None`.

    A minus belongs to the number unless it directly follows a letter, a digit, a period or a closing bracket.

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
"""Functions that extract the answer from a completion, by name."""


def without_separators(number: str) -> str:
    """Return a number without thousands separators; return any other text unchanged."""
    is_number = re.fullmatch(rf"[-+]?{_THOUSANDS}(?:\.\d+)?(?:{_EXPONENT})?", number)
    return number.replace(",", "") if is_number else number


def plain_number(text: str) -> str | None:
    """
    Return the canonical spelling of a number, with all its digits, or `None` if the text is not a number.

    Numbers with 1000 digits or more keep an exponent: written out, a short text could fill the memory.
    """
    try:
        number = Decimal(without_separators(text.replace(MINUS, "-")))
    except InvalidOperation:
        return None
    if not number.is_finite() or "_" in text:  # 101_2 means binary 101, not 1012
        return None
    number = number.normalize(_EXACT)
    if not number:
        return "0"
    return f"{number:f}" if abs(number.adjusted()) < 1000 else str(number)


def same_number(first: str | None, second: str | None) -> bool:
    """Return whether two texts are the same number; `False` if either is not a number."""
    return first is not None and second is not None and plain_number(first) == plain_number(second) is not None


def canonical(answer: str) -> str:
    r"""
    Return the same spelling for answers that differ only in spaces, dollar signs, a final period or number format.

    Example:

    ```python
    >>> [canonical(answer) for answer in ("073", "$73$", "73.0", r"\frac{1}{2}", r"\frac{1} {2}.")]
    ['73', '73', '73', '\\frac{1}{2}', '\\frac{1}{2}']

    ```
    """
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d)|\s+(?=\d{3}(?!\d))", "", answer).strip("$").removesuffix(".")  # not 3 1/2
    return plain_number(text) or text


def gold_texts(value: Any) -> list[str]:
    """
    Return the right answers in a dataset value, as texts; an empty list if the value is missing.

    Text may be a JSON list of strings (as in Skywork-OR1's `ground_truth`). Numbers are written out, whole numbers
    without decimals. `None`, NaN, empty text, and values that are neither text nor numbers count as missing.

    Example:

    ```python
    >>> gold_texts(73.0), gold_texts(0.00001), gold_texts('["1/2", "0.5"]'), gold_texts(None)
    (['73'], ['0.00001'], ['1/2', '0.5'], [])

    ```
    """
    if isinstance(value, str) and value.lstrip().startswith('["'):  # only lists of strings: [1, 2] is an interval
        with suppress(ValueError):
            value = json.loads(value)
    parts = value if isinstance(value, (list, tuple)) else [value]
    return [text for part in parts if (text := _as_text(part))]


def gold_answers(value: Any) -> list[str]:
    r"""
    Return the answers in a dataset value, any of which is right; an empty list if the value is missing.

    The answer is extracted from each of the [`gold_texts`]: the text after `####` (as in GSM8K), or the last
    `\boxed{...}` of a worked solution. Any other text is itself the answer.
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
