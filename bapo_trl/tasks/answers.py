"""How an answer is read off a completion: what the rewards of the chat tasks share."""

import re
from collections.abc import Sequence
from decimal import Decimal


Completion = str | Sequence[dict[str, str]]
"""A completion as TRL hands it to rewards: text, or the messages of a conversation."""

_THOUSANDS = r"\d{1,3}(?:,\d{3})+"
NUMBER = re.compile(rf"(?:(?<![\w.)])-)?(?:(?:{_THOUSANDS}(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)")
ANSWER_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def completion_text(completion: Completion) -> str:
    """Return a completion's text: that of its last message in a conversation."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def last_number(text: str) -> str | None:
    """
    Return the last number of a text, without commas between thousands; `None` if it has none.

    A minus belongs to the number unless it stands right behind a letter, a digit, a period or a closing bracket.

    Example:

    ```python
    >>> last_number("59 + 19 = 78."), last_number("It is -1,234.50 m."), last_number("5-3"), last_number("none")
    ('78', '-1234.50', '3', None)

    ```
    """
    numbers = NUMBER.findall(text)
    return without_separators(numbers[-1]) if numbers else None


def without_separators(number: str) -> str:
    """Return a number without commas between thousands; any other text as it is."""
    is_number = re.fullmatch(rf"[-+]?{_THOUSANDS}(?:\.\d+)?", number)
    return number.replace(",", "") if is_number else number


def same_number(first: str | None, second: str | None) -> bool:
    """
    Tell whether two texts are the same number; no number equals none.

    Example:

    ```python
    >>> same_number("073", "73.0"), same_number("73", "37"), same_number(None, "73")
    (True, False, False)

    ```
    """
    return first is not None and second is not None and Decimal(first) == Decimal(second)


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
    tagged = ANSWER_TAGS.findall(text)
    if tagged:
        return tagged[-1].strip()
    if NUMBER.fullmatch(right_answer.strip()):
        return last_number(text) or ""
    return text.strip()


def last_number_reward(completions: Sequence[Completion], answer: Sequence[str], **kwargs: object) -> list[float]:
    """
    Reward a completion whose last number is the right one.

    Args:
        completions (sequence of `str` or of messages):
            Generated texts without special tokens, or conversations.
        answer (sequence of `str`):
            The right number of each completion's prompt.
        **kwargs:
            Further columns and arguments TRL passes; unused.

    Returns:
        `list[float]`: 1.0 for the right number, else 0.0; empty for no completions.

    Example:

    ```python
    >>> last_number_reward(["59 + 19 = 78.", "78 is 59 + 19", "I see."], answer=["78", "78", "78"])
    [1.0, 0.0, 0.0]

    ```
    """
    texts = map(completion_text, completions)
    return [
        float(same_number(last_number(text), last_number(right))) for text, right in zip(texts, answer, strict=True)
    ]
