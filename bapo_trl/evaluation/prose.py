"""Extract the mathematics from answers that contain words, such as `5 dollars.` or `Adding gives x = 5`."""

import re

from .answers import NUMBER


# Words that are part of the mathematics: "1 and 2" is not 2, and "3 pi" is not 3
_MATHEMATICAL = (
    "and|or|to|by|of|in|out|times|plus|minus|over|squared|cubed|root|sqrt|pi|log|ln|exp|(?:arc)?(?:sin|cos|tan)|lcm|"
    "gcd|max|min|mod|infinity|hundred|thousand|[mb]illion|dozen|alpha|beta|theta|remainder|half|twice|thrice|negative"
)
_LETTER = "[A-Za-z\u00c0-\u024f\u0400-\u052f]"
_BETWEEN = re.compile(
    r"\(\s*\\?b?mod\s*\d+\s*\)|\\?pmod\s*\{?\s*\d+\s*\}?|<<[^<>]*>>"  # a modulus; a calculation in GSM8K's form
    rf"|(?<![\\{{])(?<!{_LETTER})(?!(?:{_MATHEMATICAL})\b){_LETTER}{{2,}}"  # a word, but no command of LaTeX
    rf"|\b[aI](?=\s(?!(?:{_MATHEMATICAL})\b)[a-z]{{2}})"  # a word of one letter
    r"|[\u0530-\u1fff\u2e80-\uffff]|[\u20a0-\u20cf\u00a2-\u00a5]"  # other scripts; currencies
)
_CONNECTED = r"\s*\b(?:and|or|to|by|of|in|out)\b\s*"
_SEVERAL_QUANTITIES = re.compile(rf"(?:{NUMBER.pattern}\s*{_LETTER}+(?:{_CONNECTED}|\s*x\s*|[\s,.]*)){{2,}}$")
_BEFORE = re.compile(  # also the letter of a choice
    rf"(?:{_CONNECTED}|\(?[A-E][).:]\s|[\s,;:?*'\"~\u2248)\]]|\.(?!\d)|\\approx\b)*+"
)
_AFTER = re.compile(
    r"(?:\s[mgsNJWVL](?:/[msgLh])?(?:\^\{?\d\}?|[\u00b2\u00b3])?|(?:\u00b0|\^\{?\\circ\}?)\s?[CF]?|\\?%"  # units
    rf"|{_CONNECTED}|[\s.,;:?*'\"(\[/])++$"
)
_EQUALS = re.compile(r"(?<![<>!\\])=")
_NAME = re.compile(r"[^A-Za-z]*|[\s{}$]*[A-Za-z][A-Za-z\s]*(?:_\{?\w+\}?)?'*\s*(?:\([^()=]*\))?[\s{}$]*")


def pieces_of_mathematics(text: str) -> list[str]:
    r"""
    Return the pieces of mathematics between the words of a text, in order; the whole text if it has no words.

    For an equation with a name or a calculation on its left, return the right side; for other equations, nothing.
    For several quantities with units, which form one answer, also return nothing.

    Example:

    ```python
    >>> for text in ("Adding 1 and 4 gives x = 5.", "5 km", r"2\sqrt{3}", "x + y = 5", "1 hour 30 minutes"):
    ...     print(pieces_of_mathematics(text))
    ['1 and 4', '5']
    ['5']
    ['2\\sqrt{3}']
    []
    []

    ```
    """
    if has_several_quantities(text):
        return []
    text = re.sub(r"(?<=\d) (?=\d{3}\b)", "", _with_plain_words(text))  # between thousands
    pieces = [_value_of(piece) for piece in _BETWEEN.split(text)]
    return [piece for piece in pieces if piece]


def has_several_quantities(text: str) -> bool:
    """Return whether a text ends in several quantities with units, such as `1 hour 30 minutes`."""
    return _SEVERAL_QUANTITIES.search(_with_plain_words(text)) is not None


def _with_plain_words(text: str) -> str:
    return re.sub(r"\\(?:text\w*|mbox|mathrm)\s*\{([^{}]*)\}", r" \1 ", text).strip()


def _value_of(piece: str) -> str | None:
    *left, value = _EQUALS.split(piece)
    if not all(_NAME.fullmatch(re.sub(r"\\[A-Za-z]+", "", side)) for side in left):
        return None
    return _BEFORE.sub("", _AFTER.sub("", value), count=1)
