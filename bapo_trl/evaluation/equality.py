"""Decide whether two answers are the same: as text, or as mathematics by TRL's reward."""

import functools
import inspect
import itertools
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .answers import boxed_answer, canonical, plain_number


SECONDS = 0.4
"""CPU time after which a comparison counts as unequal."""

_LETTER = r"[^\W\d_]"
_WRAPPED = re.compile(r"\\(?:text\w*|mbox|mathrm|mathbf|mathit|operatorname)\s*\{([^{}]*)\}")
_SPACE = re.compile(r"\\[,;:! ]|~|\\q?quad\b")
_SIZE = re.compile(r"\\(?:left|right|displaystyle)(?![A-Za-z])")
_COMMAND = re.compile(
    rf"\\(?:begin|end)\s*\{{\w*\*?\}}|\\[A-Za-z]+|(?<!{_LETTER})(?:(?:arc)?(?:sin|cos|tan)|log|ln|exp|sqrt|max|min|gcd"
    rf"|lcm|pi|and|or)(?!{_LETTER})"
)
_CODE = re.compile(
    rf"{_LETTER}\s*\d+(?![\d^])"  # codes and several quantities: CO2, covid19, 2 hours 30 minutes
    r"|\d\s+\d"  # mixed numbers and lists: 3 1/2
    r"|\d\s*:\s*\d\d"  # times
    r"|^\s*\d+\s*([-/.])\s*\d+\s*\1\s*\d+\s*$"  # dates
)
_WORDS = re.compile(rf"{_LETTER}{{3}}.*(?<!{_LETTER}){_LETTER}{{3}}", re.DOTALL)
_ONLY_LETTERS = re.compile(rf"(?:{_LETTER}|[\s.,;:!?'\"\u2019()])*{_LETTER}{{2}}(?:{_LETTER}|[\s.,;:!?'\"\u2019()])*")
_FORMULA = re.compile(r"\d*(?:[A-Z][a-z]?|_\{?\d+\}?|\^\{?\d*[-+]\}?|[()\s])+")
_WORD = re.compile(rf"{_LETTER}{{3,}}|(?:[A-Z]{_LETTER}|{_LETTER}[A-Z])")
_ONE_DIGIT = ((r"\\[dt]?frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"), (r"\\sqrt\s*(\d)", r"\\sqrt{\1}"))
_AFTER_ANSWER = re.compile(r"answer.{0,50}?(?:\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\])", re.IGNORECASE | re.DOTALL)
_MAX_CHARACTERS = 1000  # of an answer and the line around it
_MAX_DIGITS = 1e6


_JUDGES = ("antlr4", "latex2sympy2_extended", "math_verify", "mpmath", "sympy")  # the packages that compare answers


class _TooLong(BaseException):
    """A comparison took too long. math-verify and sympy catch every `Exception`."""


def same_text(first: str, second: str) -> bool:
    r"""
    Return whether two answers are equal but for case, spaces, LaTeX's wrappers of text, and the format of a number.

    Example:

    ```python
    >>> same_text(r"\text{New York}", "new york."), same_text("1e3", "1,000"), same_text("CO2", "2")
    (True, True, False)

    ```
    """
    return _spelling(first) == _spelling(second)


def is_text(answer: str) -> bool:
    r"""
    Return whether an answer is compared only as text, as reading it as mathematics would change it.

    These are letters alone (words, choices of several letters), several words, codes and chemical formulas, several
    quantities in a row, times and dates.

    Example:

    ```python
    >>> [is_text(answer) for answer in ("BADC", "CO2", "10:00 am", "2 h 30 min", "2024-05-01")]
    [True, True, True, True, True]
    >>> [is_text(answer) for answer in ("A", "2xy", r"\sin x", "x+1", "5 cm", "a_1 + a_2", r"\frac12")]
    [False, False, False, False, False, False, False]

    ```
    """
    plain = _without_commands(answer)
    if len(plain) > _MAX_CHARACTERS:
        return True
    is_formula = _FORMULA.fullmatch(plain.strip()) and sum(map(str.isupper, plain)) > 1
    return bool(is_formula or _ONLY_LETTERS.fullmatch(plain) or _WORDS.search(plain) or _CODE.search(plain))


def given_answer(text: str) -> tuple[str | None, str]:
    r"""
    Return the answer in a completion and the part that TRL's reward reads: the last closed `\boxed{...}`, or LaTeX
    after the word "answer". Without an answer, return `None` and an empty text.
    """
    answer = boxed_answer(text)
    if answer is not None:
        line = text[text.rfind("\n", 0, text.rfind(r"\boxed{")) + 1 :]
        is_short = len(line) <= _MAX_CHARACTERS and boxed_answer(line) == answer
        return answer, line if is_short else f"\\boxed{{{answer}}}"
    start = text.lower().rfind("answer")
    part = text[start : start + _MAX_CHARACTERS] if start >= 0 else ""
    found = _AFTER_ANSWER.match(part)
    return (next(filter(None, found.groups())).strip(), part) if found else (None, "")


def is_right(gold: str, text: str) -> bool:
    r"""
    Return whether a completion's answer is `gold`.

    The answer is right if it is the same text. Otherwise, unless the right answer [`is_text`], TRL's
    `accuracy_reward` decides. TRL drops units and reads words as products of letters, so if both answers have
    letters, they must also be equal with their units, and have the same words in the same order.
    """
    answer, part = given_answer(text)
    if answer is None:
        return False
    is_boxed = boxed_answer(text) is not None  # after the word "answer", `$1$ and $2$` are one answer
    if same_text(gold, answer) and (is_boxed or is_text(gold)):
        return True
    if is_text(gold) or len(answer) > _MAX_CHARACTERS or (is_boxed and _are_integers(gold, answer)):
        return False
    return _is_equal(gold, answer, part)


def same_answer(first: str, second: str) -> bool:
    """Return whether the second answer is right where the first is, as [`is_right`] decides."""
    return same_text(first, second) or is_right(first, f"\\boxed{{{second}}}")


@functools.lru_cache(maxsize=10_000)
def _is_equal(gold: str, answer: str, part: str) -> bool:
    both_have_letters = _has_letters(gold) and _has_letters(answer)
    if both_have_letters and (is_text(answer) or _words(gold) != _words(answer)):
        return False
    if _CODE.search(_without_commands(answer)):
        return False
    box, part = f"\\boxed{{{gold}}}", _with_braces(part)
    _warm_up()
    try:
        with _at_most(SECONDS):
            if _has_huge_number(box) or _has_huge_number(part):
                return False
            return _trls_reward(part, box) == 1 and (not both_have_letters or _same_with_units(gold, answer))
    except _TooLong:
        return False


def _trls_reward(text: str, solution: str) -> float | None:
    from trl.rewards import accuracy_reward

    return accuracy_reward([[{"role": "assistant", "content": text}]], solution=[solution])[0]


@functools.cache
def _warm_up() -> None:
    """Compare once, as the first comparison also loads tables and modules."""
    _trls_reward(r"\boxed{(x+1)^2}", r"\boxed{x^2+2x+1}")


@functools.cache
def _reader(keeps_units: bool) -> Callable[[str], list[Any]]:
    """Return a function that reads LaTeX as TRL does, or with its units."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    form = NormalizationConfig(basic_latex=True, units=not keeps_units, malformed_operators=keeps_units, nits=True)
    config = [LatexExtractionConfig(normalization_config=form, boxed_match_priority=0)]
    return lambda text: [part for part in parse(text, config, parsing_timeout=None) if not isinstance(part, str)]


def _same_with_units(gold: str, answer: str) -> bool:
    from math_verify import verify

    read = _reader(keeps_units=True)
    return verify(*(read(f"\\boxed{{{_unwrapped(text)}}}") for text in (gold, answer)), timeout_seconds=None)


def _has_huge_number(text: str) -> bool:
    """Return whether evaluating what TRL reads gives a number of more than a million digits."""
    return any(_num_digits(part) > _MAX_DIGITS for part in _reader(keeps_units=False)(text))


def _num_digits(expression: Any) -> float:
    """Return an upper bound of the digits of the numbers in an expression, once evaluated."""
    from sympy import Integer, Pow, Product
    from sympy.functions.combinatorial.factorials import CombinatorialFunction

    digits = [_num_digits(part) for part in getattr(expression, "args", None) or getattr(expression, "flat", list)()]
    if not digits:
        return max(1, int(expression).bit_length() * 0.302) if isinstance(expression, Integer) else 1
    if isinstance(expression, (Pow, Product, CombinatorialFunction)):
        return sum(digits) * 10 ** min(digits[-1] if isinstance(expression, Pow) else max(digits), 100)
    return sum(digits)


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """
    Raise `_TooLong` after some seconds of CPU time in this thread.

    Python calls the check for each call of a function. Signals, as TRL uses, reach only the main thread.
    """
    end, calls, previous = time.thread_time() + seconds, itertools.count(), sys.getprofile()

    def check(frame: Any, event: str, _: Any) -> None:
        # Python ignores what is raised while it closes a generator or frees an object, and checks no further
        if event != "call" or next(calls) % 32 or frame.f_code.co_flags & inspect.CO_GENERATOR:
            return
        if frame.f_globals.get("__name__", "").partition(".")[0] in _JUDGES and time.thread_time() > end:
            raise _TooLong

    sys.setprofile(check)
    try:
        yield
    finally:
        sys.setprofile(previous)


def _unwrapped(answer: str) -> str:
    while len(answer) <= _MAX_CHARACTERS and answer != (inner := _WRAPPED.sub(r" \1 ", answer)):
        answer = inner
    return _with_braces(_SIZE.sub("", _SPACE.sub(" ", answer)))


def _with_braces(text: str) -> str:
    for short, braced in _ONE_DIGIT:
        text = re.sub(short, braced, text)
    return text


def _without_commands(answer: str) -> str:
    return _COMMAND.sub(r"\\", _unwrapped(answer))


@functools.lru_cache(maxsize=10_000)
def _spelling(answer: str) -> str:
    return canonical(_unwrapped(answer).strip().strip("*").casefold())


def _words(answer: str) -> list[str]:
    return [word.casefold() for word in _WORD.findall(_without_commands(answer))]


def _has_letters(answer: str) -> bool:
    return re.search(_LETTER, _without_commands(answer)) is not None


def _are_integers(*answers: str) -> bool:
    return all((plain_number(answer) or "-").removeprefix("-").isdigit() for answer in answers)
