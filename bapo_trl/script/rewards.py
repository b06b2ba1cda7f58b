"""Resolve the names in flags: the task, the reward functions, and the function that extracts answers."""

import functools
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from trl import rewards

from ..errors import InputError
from ..evaluation.answers import EXTRACTORS, completion_text, gold_answers
from ..evaluation.equality import given_answer, is_right
from ..tasks import MadeTask
from .data.load import make_task
from .settings.arguments import EMBEDDED
from .settings.parser import Settings


def _of_chats(reward: Callable) -> Callable:
    """Wrap a TRL reward function for chat messages, so that it also scores plain text."""

    @functools.wraps(reward)
    def scored(completions: list[Any], **kwargs: Any) -> list[float | None]:
        return reward([_as_messages(completion) for completion in completions], **kwargs)

    return scored


def accuracy_reward(
    completions: list[Any], solution: list[Any], log_extra: Callable | None = None, **kwargs: Any
) -> list[float | None]:
    """
    Return 1 for each completion with one of the [`~evaluation.answers.gold_answers`], as
    [`~evaluation.equality.is_right`] decides, else 0; `None` without a right answer.
    """
    texts, golds = [completion_text(completion) for completion in completions], list(map(gold_answers, solution))
    if log_extra is not None:
        log_extra("solution", [" or ".join(each) or None for each in golds])
        log_extra("answer", [given_answer(text)[0] for text in texts])
    return [
        float(any(is_right(gold, text) for gold in each)) if each else None
        for text, each in zip(texts, golds, strict=True)
    ]


def reasoning_accuracy_reward(completions: list[Any], **kwargs: Any) -> list[float | None]:
    """Return the [`accuracy_reward`] of the text after the last `</think>`, without which there is no answer."""
    parts = [completion_text(completion).rpartition("</think>") for completion in completions]
    return accuracy_reward([answer if mark else "" for _, mark, answer in parts], **kwargs)


def _as_messages(completion: Any) -> Any:
    """Return a completion as messages; the text of a message is empty if it is only a tool call."""
    if isinstance(completion, str):
        return [{"role": "assistant", "content": completion}]
    return [{**message, "content": message.get("content") or ""} for message in completion]


REWARDS: dict[str, Callable] = {
    "accuracy_reward": accuracy_reward,
    "reasoning_accuracy_reward": reasoning_accuracy_reward,
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
        found = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"`{flag}` has '{name}', which cannot be imported ({error}): check the path, and run from the folder "
            "that contains the module, or install its package."
        ) from error
    if not callable(found):
        raise InputError(f"`{flag}` has '{name}', which is no function but {type(found).__name__}: name a function.")
    return found
