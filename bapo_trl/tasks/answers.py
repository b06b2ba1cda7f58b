"""How an answer is read off a completion: what the rewards of the chat tasks share."""

import re
from collections.abc import Mapping, Sequence
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal, InvalidOperation
from typing import Any


Completion = str | Sequence[Mapping[str, Any]]
"""A completion as TRL hands it to rewards: text, or the messages of a conversation."""

MINUS = "\N{MINUS SIGN}"
"""The minus of typeset text, which counts as a hyphen does."""

_THOUSANDS = r"\d{1,3}(?:,\d{3})+"
_EXPONENT = rf"[eE][-+{MINUS}]?\d+(?!\w|\.\d)"
NUMBER = re.compile(
    rf"(?:(?<![\w.)])[-{MINUS}])?(?:(?:{_THOUSANDS}(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)(?:{_EXPONENT})?"
)
_EXACT = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN)  # the usual one rounds to 28 digits


def completion_text(completion: Completion) -> str:
    """Return a completion's text: that of its last message in a conversation, which a call of a tool has not."""
    return completion if isinstance(completion, str) else completion[-1].get("content") or ""


def last_number(text: str) -> str | None:
    """
    Return the last number of a text, without commas between thousands and with a hyphen for a minus; `None` if it has
    none.

    A minus belongs to the number unless it stands right behind a letter, a digit, a period or a closing bracket.

    Example:

    ```python
    >>> last_number("59 + 19 = 78."), last_number("It is -1,234.50 m."), last_number("5-3"), last_number("none")
    ('78', '-1234.50', '3', None)

    ```
    """
    numbers = NUMBER.findall(text)
    return without_separators(numbers[-1].replace(MINUS, "-")) if numbers else None


def without_separators(number: str) -> str:
    """Return a number without commas between thousands; any other text as it is."""
    is_number = re.fullmatch(rf"[-+]?{_THOUSANDS}(?:\.\d+)?(?:{_EXPONENT})?", number)
    return number.replace(",", "") if is_number else number


def plain_number(text: str) -> str | None:
    """
    Return the one spelling of a number, all its digits kept, or `None` for what is none.

    Numbers of 1000 places and more keep an exponent: written out, a short one could fill the memory.

    Example:

    ```python
    >>> [plain_number(text) for text in ("073", "73.0", "1,234", "1e-05", "-0", "1e9999999", "x")]
    ['73', '73', '1234', '0.00001', '0', '1E+9999999', None]

    ```
    """
    try:
        number = Decimal(without_separators(text.replace(MINUS, "-")))
    except InvalidOperation:
        return None
    if not number.is_finite():
        return None
    number = number.normalize(_EXACT)
    if not number:
        return "0"
    return f"{number:f}" if abs(number.adjusted()) < 1000 else str(number)


def same_number(first: str | None, second: str | None) -> bool:
    """
    Tell whether two texts are the same number; no number equals none.

    Example:

    ```python
    >>> same_number("073", "73.0"), same_number("73", "37"), same_number(None, "73")
    (True, False, False)

    ```
    """
    return first is not None and second is not None and plain_number(first) == plain_number(second) is not None


def read_answer(text: str, right_answer: str) -> str:
    """
    Read the answer off a text: the last thing between `<answer>` tags; or else the last number, if the right answer is
    a number; or else the whole text.

    Spaces around it do not count.

    Example:

    ```python
    >>> read_answer("So <answer> 4 </answer>, not 5.", "4"), read_answer("2 + 2 = 4.", "4"), read_answer(" no ", "yes")
    ('4', '4', 'no')

    ```
    """
    start = text.rfind("<answer>", 0, max(text.rfind("</answer>"), 0))
    if start >= 0:
        start += len("<answer>")
        return text[start : text.find("</answer>", start)].strip()
    if NUMBER.fullmatch(right_answer.strip()):
        return last_number(text) or ""
    return text.strip()


def last_number_reward(
    completions: Sequence[Completion], answer: Sequence[Any], **kwargs: object
) -> list[float | None]:
    """
    Reward a completion whose last number is the right one.

    Args:
        completions (sequence of `str` or of messages): Generated texts without special tokens, or conversations.
        answer (sequence of `str` or numbers): The right number of each completion's prompt.
        **kwargs:
            Further columns and arguments TRL passes; unused.

    Returns:
        `list[float | None]`: 1.0 for the right number, else 0.0; `None` where `answer` has no number. Empty for no
        completions.

    Example:

    ```python
    >>> last_number_reward(["59 + 19 = 78.", "78 is 59 + 19", "I see."], answer=["78", "78", "78"])
    [1.0, 0.0, 0.0]

    ```
    """
    golds = [last_number(str(right)) for right in answer]
    return [
        None if gold is None else float(same_number(last_number(completion_text(completion)), gold))
        for completion, gold in zip(completions, golds, strict=True)
    ]
