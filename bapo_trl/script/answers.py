"""Pure: the answer in a completion, and the answers that a column holds, as plain text."""

import json
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

from ..tasks.answers import last_number, without_separators


def boxed_answer(text: str) -> str | None:
    r"""
    Return what the last `\boxed{...}` holds, or `None` if there is none that is closed.

    Example:

    ```python
    >>> boxed_answer(r"first \boxed{1}, then \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'

    ```
    """
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    start += len(r"\boxed{")
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position]
    return None


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
    try:
        number = Decimal(without_separators(text))
    except InvalidOperation:
        return text
    return f"{number.normalize():f}" if number.is_finite() else text


def gold_answers(value: Any) -> list[str]:
    r"""
    Return the answers that a column's value stands for; any of them is right.

    Numbers, a JSON list in a string (as in Skywork-OR1's `ground_truth`), the text after `####` (as in GSM8K) and the
    last `\boxed{...}` of a worked solution are understood. Any other text is itself the answer.

    Args:
        value (`str`, `int`, `float` or a list of these):
            Value of a row. A number that is whole loses its decimals.

    Example:

    ```python
    >>> gold_answers(73.0), gold_answers('["1/2", "0.5"]'), gold_answers("so 6 * 7 is 42\n#### 42")
    (['73'], ['1/2', '0.5'], ['42'])
    >>> gold_answers(r"Adding up, we get \boxed{5}, which is odd.")
    ['5']

    ```
    """
    if isinstance(value, (list, tuple)):
        return [answer for part in value for answer in gold_answers(part)]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = str(value).strip()
    if text.startswith('["'):  # strings: [1, 2] is an interval
        try:
            return gold_answers(json.loads(text))
        except json.JSONDecodeError:
            pass
    if "####" in text:
        text = text.rpartition("####")[2].strip()
    boxed = boxed_answer(text)
    return [without_separators(text if boxed is None else boxed)]
