"""Resolve the names in flags: the task, the reward functions, and the function that extracts answers."""

import functools
import importlib
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from trl import rewards

from ..errors import InputError
from ..evaluation.answers import EXTRACTORS, boxed_answer, canonical, gold_answers, gold_texts, plain_number
from ..evaluation.prose import has_several_quantities, pieces_of_mathematics
from ..tasks import MadeTask
from .arguments import EMBEDDED
from .command_line import Settings
from .datasets import make_task


def _of_chats(reward: Callable) -> Callable:
    """Wrap a TRL reward function for chat messages, so that it also scores plain text."""

    @functools.wraps(reward)
    def scored(completions: list[Any], **kwargs: Any) -> list[float | None]:
        return reward([_as_messages(completion) for completion in completions], **kwargs)

    return scored


def _of_answers(reward: Callable) -> Callable:
    """
    Wrap a TRL reward function that compares with `solution`, to accept [`~evaluation.answers.gold_texts`] and text.

    The reward is the highest over all readings of the answers, or `None` without an answer.
    """

    @functools.wraps(reward)
    def scored(
        completions: list[Any], solution: list[Any], log_extra: Callable | None = None, **kwargs: Any
    ) -> list[float | None]:
        judged = [
            _best_of(reward, _as_answer(completion), _readings(value), kwargs)
            for completion, value in zip(completions, solution, strict=True)
        ]
        if log_extra is not None:
            for column in dict.fromkeys(column for _, extra in judged for column in extra):
                log_extra(column, [extra.get(column) for _, extra in judged])
        return [given for given, _ in judged]

    return scored


def _readings(value: Any) -> dict[str, bool]:
    r"""
    Return the texts to pass to TRL's reward as the right answer, in order, and whether TRL reads all of each.

    TRL extracts a number from text that is not LaTeX, in a box or not. So it reads `5 dollars.` as 5, but also reads
    `2\sqrt{3}`, `(1, 2)` and `\boxed{2 \bmod 3}` as the last or first number, although that is only a part.
    """
    readings: dict[str, bool] = {}
    for text in map(_as_trl_reads, gold_texts(value)):
        for answer in gold_answers(text):
            box = f"\\boxed{{{answer}}}"
            readings[box] = _is_latex(box) or _is_read_whole(box, answer)
            pieces = pieces_of_mathematics(answer)
            if len(pieces) == 1 and _is_latex(f"\\boxed{{{pieces[0]}}}"):
                readings[f"\\boxed{{{pieces[0]}}}"] = True
            if boxed_answer(text) is not None and readings[box]:
                readings = {text: True, **readings}
            elif _is_read_whole(answer, answer):
                readings = {answer: True, **readings}
            if plain_number(answer):  # TRL does not know `1e-5`
                readings[f"\\boxed{{{plain_number(answer)}}}"] = True
    return readings


@functools.lru_cache(maxsize=10_000)
def _is_latex(box: str) -> bool:
    """Return whether TRL can read a box as LaTeX, and the box does not hold several quantities."""
    return bool(_parsed(box, is_latex=True)) and not has_several_quantities(box[len(r"\boxed{") : -1])


@functools.lru_cache(maxsize=10_000)
def _is_read_whole(reading: str, answer: str) -> bool:
    """Return whether TRL reads the mathematics between the words of an answer, or one of its pieces."""
    from math_verify import verify

    read = _parsed(reading)
    return any(
        verify(read, _parsed(f"\\boxed{{{piece}}}", is_latex=True), timeout_seconds=_timeout(5))
        for piece in pieces_of_mathematics(answer)
    )


def _parsed(text: str, is_latex: bool = False) -> list[Any]:
    """Return the mathematical expressions that TRL reads in a text."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    kinds = [LatexExtractionConfig()] if is_latex else [LatexExtractionConfig(), ExprExtractionConfig()]
    return [part for part in parse(text, kinds, parsing_timeout=_timeout(10)) if not isinstance(part, str)]


def _timeout(seconds: int) -> int | None:
    return seconds if threading.current_thread() is threading.main_thread() else None  # as in TRL


def _as_answer(completion: Any) -> Any:
    """Return a completion as messages, with numbers in a form that TRL reads correctly."""
    messages = _as_messages(completion)
    for message in messages:
        if isinstance(message["content"], str):  # otherwise a list with images
            message["content"] = _as_trl_reads(message["content"])
    return messages


def _as_trl_reads(text: str) -> str:
    r"""
    Return a text with its numbers in a form that TRL reads correctly.

    Otherwise TRL reads `3 1/2` as 2, `1\,000` as 0, `3\mathrm{i}` as 3, and nothing in `5~\mathrm{m}` and `10**5`.
    """
    text = re.sub(r"(?<![\w.,/])(\d+) +(\d+)/(\d+)(?![\w./])", r"\1\\frac{\2}{\3}", text)
    text = re.sub(r"(?<=\d)\\[,;: ](?=\d{3}(?!\d))", "", text).replace("~", " ")
    text = re.sub(r"(?<=[\w)])\*\*(?=[\w(])", "^", text)
    return re.sub(r"\\mathrm\{([ie])\}", r"\1", text)


def _best_of(
    reward: Callable, messages: Any, readings: dict[str, bool], kwargs: dict[str, Any]
) -> tuple[float | None, dict[str, Any]]:
    """Return the highest reward, and the columns that TRL logs for it."""
    best: float | None = None
    noted: dict[str, list[Any]] = {}
    for reading, is_whole in readings.items():
        extra: dict[str, list[Any]] = {}
        (given,) = reward([messages], solution=[reading], log_extra=extra.__setitem__, **kwargs)
        if given and not is_whole:  # only a part matched: the texts must be equal
            answer = boxed_answer(messages[0]["content"])
            given = float(answer is not None and canonical(answer) == canonical(boxed_answer(reading) or ""))
        if best is None or (given is not None and given > best):
            best, noted = given, extra
        if best == 1:
            break
    return best, {column: values[0] for column, values in noted.items()}


def _as_messages(completion: Any) -> Any:
    """Return a completion as messages; the text of a message is empty if it is only a tool call."""
    if isinstance(completion, str):
        return [{"role": "assistant", "content": completion}]
    return [{**message, "content": message.get("content") or ""} for message in completion]


REWARDS: dict[str, Callable] = {
    "accuracy_reward": _of_answers(rewards.accuracy_reward),
    "reasoning_accuracy_reward": _of_answers(rewards.reasoning_accuracy_reward),
    "think_format_reward": _of_chats(rewards.think_format_reward),
}
"""TRL's reward functions by their names in TRL's scripts, except the one that depends on a length."""


def resolve_names(settings: Settings) -> tuple[MadeTask | None, list[Any], Callable[[str], str | None] | None]:
    """
    Return the task, the reward functions and the answer extractor; raise an `InputError` if data or model is not set.
    """
    script_args, training_args, model_args, dataset_args = settings
    evaluates_alone = script_args.eval_dataset is not None and not training_args.do_train
    if not (script_args.dataset_name or dataset_args.datasets or evaluates_alone):
        raise InputError(
            "`dataset_name` is not set: set it to a json, jsonl or parquet file, a dataset folder, a Hub id, or "
            f"'{EMBEDDED}' for the built-in task (or list `datasets` in the config file)."
        )
    task = make_task(script_args.dataset_name, script_args.task_args)
    if not script_args.reward_funcs and task is None:
        raise InputError("`reward_funcs` is not set: set a reward function of TRL or an import path, see --help.")
    if model_args.model_name_or_path is None:
        raise InputError("`model_name_or_path` is not set: set a folder, a Hub id, 'embedded' or 'smollm2'.")
    name = script_args.extract_answer
    extract_answer = None if name is None else _resolve("extract_answer", name, EXTRACTORS)
    if not script_args.reward_funcs:
        return task, [task.reward_func], extract_answer
    return task, resolve_reward_funcs(script_args.reward_funcs, training_args.max_completion_length), extract_answer


def resolve_reward_funcs(names: Sequence[str], max_completion_length: int = 256) -> list[Callable]:
    """
    Return the reward functions with the given names in [`REWARDS`] or import paths, including the working directory.

    `get_soft_overlong_punishment` falls from 0 to -1 over the last fifth of `max_completion_length`, as in DAPO
    (https://huggingface.co/papers/2503.14476).
    """
    punishment = rewards.get_soft_overlong_punishment(max_completion_length, max_completion_length // 5)
    known = {**REWARDS, "get_soft_overlong_punishment": punishment}
    return [_resolve("reward_funcs", name, known) for name in names]


def _resolve(flag: str, name: str, known: dict[str, Callable]) -> Callable:
    if name in known:
        return known[name]
    module_name, _, function_name = name.rpartition(".")
    if not module_name:
        raise InputError(
            f"`{flag}` has '{name}', which is not known: choose one of {', '.join(known)}, or set an import path "
            "such as 'my_package.rewards.my_reward'."
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"`{flag}` has '{name}', which cannot be imported ({error}): check the path, and run from the folder "
            "that contains the module, or install its package."
        ) from error
