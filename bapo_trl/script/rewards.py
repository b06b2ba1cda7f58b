"""Resolve the functions that `train_bapo.py` is told by name: rewards, and what finds an answer in a completion."""

import functools
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from trl import rewards
from trl.import_utils import is_math_verify_available

from ..errors import InputError
from ..evaluation.answers import EXTRACTORS, gold_answers, gold_texts


def _of_chats(reward: Callable) -> Callable:
    """Let a reward of TRL's that reads chat messages score plain text too."""

    @functools.wraps(reward)
    def scored(completions: list[Any], **kwargs: Any) -> list[float | None]:
        return reward([_as_messages(completion) for completion in completions], **kwargs)

    return scored


def _of_answers(reward: Callable) -> Callable:
    """
    Let a reward of TRL's that compares with `solution` take all [`~evaluation.answers.gold_texts`], and plain text.

    Of several readings of an answer, the one that gives the highest reward counts. Without an answer there is none.
    """

    @functools.wraps(reward)
    def scored(
        completions: list[Any], solution: list[Any], log_extra: Callable | None = None, **kwargs: Any
    ) -> list[float | None]:
        judged = [
            _best_of(reward, _as_messages(completion), _readings(value), kwargs)
            for completion, value in zip(completions, solution, strict=True)
        ]
        if log_extra is not None:
            for column in dict.fromkeys(column for _, extra in judged for column in extra):
                log_extra(column, [extra.get(column) for _, extra in judged])
        return [given for given, _ in judged]

    return scored


def _readings(value: Any) -> list[str]:
    r"""
    Return what to give to TRL's reward as the right answer, in turn: the text itself, then the answer in it, boxed.

    math-verify finds the number in `5 dollars.`, but reads a bare `2\sqrt{3}` as 2, `(1, 2)` as 2, and `x^2+1` not at
    all. In a box these are what they say.
    """
    whole = [value] if isinstance(value, str) and gold_texts(value) == [value.strip()] else []  # no list of answers
    return whole + [f"\\boxed{{{answer}}}" for answer in gold_answers(value)]


def _best_of(
    reward: Callable, messages: Any, readings: list[str], kwargs: dict[str, Any]
) -> tuple[float | None, dict[str, Any]]:
    """Return the highest reward, and what TRL notes about the reading that gave it, by column."""
    best, noted = None, {}
    for reading in readings:
        extra: dict[str, Any] = {}

        def note(column: str, values: list[Any], extra: dict[str, Any] = extra) -> None:
            extra[column] = values[0]

        (given,) = reward([messages], solution=[reading], log_extra=note, **kwargs)
        if best is None or (given is not None and given > best):
            best, noted = given, extra
        if best == 1:
            break
    return best, noted


def _as_messages(completion: Any) -> Any:
    """Return a completion as messages, each with a text, which a call of a tool may lack."""
    if isinstance(completion, str):
        return [{"role": "assistant", "content": completion}]
    return [{**message, "content": message.get("content") or ""} for message in completion]


REWARDS: dict[str, Callable] = {
    "accuracy_reward": _of_answers(rewards.accuracy_reward),
    "reasoning_accuracy_reward": _of_answers(rewards.reasoning_accuracy_reward),
    "think_format_reward": _of_chats(rewards.think_format_reward),
}
"""TRL's reward functions by the names that TRL's own scripts give them, but for the one that depends on a length."""

_OVERLONG = "get_soft_overlong_punishment"
_NEED_MATH = ("accuracy_reward", "reasoning_accuracy_reward")


def resolve_reward_funcs(names: Sequence[str], max_completion_length: int | None = 256) -> list[Callable]:
    """
    Return reward functions by names in [`REWARDS`] or import paths; modules in the working directory count.

    `get_soft_overlong_punishment` falls from 0 to -1 over the last fifth of the tokens that a completion may have, as
    in DAPO (https://huggingface.co/papers/2503.14476).
    """
    for name in names:
        if name in _NEED_MATH and not is_math_verify_available():
            raise InputError(
                f"`reward_funcs` has '{name}', which needs the package math-verify: install it with "
                "`pip install 'bapo-trl[math]'`, or name another reward."
            )
    length = max_completion_length or 0
    if _OVERLONG in names and not length:
        raise InputError(f"`reward_funcs` has '{_OVERLONG}', and `max_completion_length` is not set: set it.")
    known = {**REWARDS, _OVERLONG: rewards.get_soft_overlong_punishment(length, length // 5)}
    return [_resolve("reward_funcs", name, known) for name in names]


def resolve_extractor(name: str | None) -> Callable[[str], str | None] | None:
    """Return what finds the answer in a completion, of [`~evaluation.answers.EXTRACTORS`] or by an import path."""
    return None if name is None else _resolve("extract_answer", name, EXTRACTORS)


def _resolve(flag: str, name: str, known: dict[str, Callable]) -> Callable:
    if name in known:
        return known[name]
    module_name, _, function_name = name.rpartition(".")
    if not module_name:
        raise InputError(
            f"`{flag}` has '{name}', which is not known: choose one of {', '.join(known)}, or give an import path "
            "such as 'my_package.rewards.my_reward'."
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:  # the latter two: for what is no name
        raise InputError(
            f"`{flag}` has '{name}', which cannot be imported ({error}): check the path and run from the folder "
            "that holds it, or install its package."
        ) from error
    if not callable(function):
        raise InputError(f"`{flag}` has '{name}', which is not a function.")
    return function
