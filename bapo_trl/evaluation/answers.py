"""Pure: the answer in a completion, and the answers that a column holds, as plain text."""

import json
import re
from collections.abc import Callable
from numbers import Number
from typing import Any

from ..tasks.answers import last_number, plain_number, without_separators


_BRACES = re.compile(r"\\boxed\{|\\\\|\\[{}]|[{}]")


def boxed_answer(text: str) -> str | None:
    r"""
    Return what the last closed `\boxed{...}` holds, or `None` if there is none or it is empty.

    Braces that are to be seen, `\{` and `\}`, close nothing.

    Example:

    ```python
    >>> boxed_answer(r"first \boxed{1}, then \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'

    ```
    """
    opened: list[int | None] = []  # for each open brace, where the content of its box begins, if it is one
    begin = end = 0
    for brace in _BRACES.finditer(text):
        if brace[0] in (r"\boxed{", "{"):
            opened.append(brace.end() if brace[0] == r"\boxed{" else None)
        elif brace[0] == "}" and opened and (start := opened.pop() or 0) > begin:
            begin, end = start, brace.start()
    return text[begin:end].strip() or None


def whole_text(text: str) -> str | None:
    """Return the text without the spaces around it, or `None` if nothing is left."""
    return text.strip() or None


EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "boxed": boxed_answer,
    "last_number": last_number,
    "text": whole_text,
}
"""Ways to find the answer in a completion, by name."""


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

    Args:
        value (`str`, number or list of these): Value of a row. Text may be a JSON list of strings (as in Skywork-OR1's
            `ground_truth`). A number is written out, one that is whole without decimals. `None`, NaN and empty text
            are missing, and so is what is neither text nor number.

    Example:

    ```python
    >>> gold_texts(73.0), gold_texts(0.00001), gold_texts('["1/2", "0.5"]'), gold_texts(None)
    (['73'], ['0.00001'], ['1/2', '0.5'], [])

    ```
    """
    parts = value if isinstance(value, (list, tuple)) else _listed(value)
    return [text for part in parts if (text := _as_text(part))]


def _listed(value: Any) -> list[Any]:
    if isinstance(value, str) and value.lstrip().startswith('["'):  # strings: [1, 2] is an interval
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            pass
    return [value]


def _as_text(value: Any) -> str | None:
    if isinstance(value, Number) and not isinstance(value, bool):
        return plain_number(str(value))
    return str(value).strip() if isinstance(value, (str, bool)) else None


def gold_answers(value: Any) -> list[str]:
    r"""
    Return the answers that a column's value stands for; any of them is right. None for a value that is missing.

    Of each of its [`gold_texts`], the text after `####` (as in GSM8K) and the last `\boxed{...}` of a worked solution
    are understood. Any other text is itself the answer.

    Example:

    ```python
    >>> gold_answers(73.0), gold_answers('["1/2", "0.5"]'), gold_answers("so 6 * 7 is 42\n#### 42")
    (['73'], ['1/2', '0.5'], ['42'])
    >>> gold_answers(r"Adding up, we get \boxed{5}, which is odd.")
    ['5']

    ```
    """
    return [answer for text in gold_texts(value) if (answer := _answer_in(text))]


def _answer_in(text: str) -> str:
    answer = text.rpartition("####")[2]
    return without_separators(boxed_answer(answer) or answer.strip().removesuffix("."))
