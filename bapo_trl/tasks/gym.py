"""
Load tasks of the package `reasoning-gym` by name. The problems are generated from a seed and verifiable.

Each row holds all that scoring needs, as JSON: the task's name, its arguments, and the entry. So the reward function
needs only the batch, on any rank and after resuming.
"""

import difflib
import functools
import json
import warnings
from collections.abc import Sequence
from typing import Any

from datasets import Dataset

from ..errors import InputError, MissingPackageError
from ..evaluation.answers import NUMBER, Text, completion_text, last_number
from .sums import MadeTask


GYM_PREFIX = "reasoning_gym:"
"""Prefix of a reasoning-gym task in `--dataset_name`."""

TRAIN_SIZE, TEST_SIZE = 2000, 256


def load_gym_task(name: str, task_args: str | dict[str, Any] | None = None) -> MadeTask:
    """
    Create a reasoning-gym task from its name, such as `"chain_sum"`, with or without the prefix `"reasoning_gym:"`.

    `task_args` (JSON or a dictionary) are the arguments of the task's config class in reasoning-gym. `size` is the
    number of training problems (default: 2000), `seed` the seed of the problems (default: 0). The dataset has the
    columns `prompt` (one user message), `answer` (`""` if several answers are right) and `entry` (JSON). The reward
    function is [`gym_reward`].

    reasoning-gym creates problem i from the number seed + i. The test problems use the numbers after those of the
    training problems. A training problem that also occurs among the test problems is removed.
    """
    name = name.removeprefix(GYM_PREFIX)
    args = _parse(task_args)
    problems = _problems(name, args)
    test = _problems(name, {**args, "size": TEST_SIZE, "seed": args["seed"] + args["size"]})
    _check_scores(test[0])
    asked = {_question(row) for row in test}
    train = [row for row in problems if _question(row) not in asked]
    if not train:
        raise InputError(
            f"`task_args` is {json.dumps(args)}: all training problems of '{name}' also occur in its test set, so "
            "none is left. Raise `size`, or set arguments that give more distinct problems."
        )
    return MadeTask(f"{GYM_PREFIX}{name}", Dataset.from_list(train), Dataset.from_list(test), gym_reward)


def gym_reward(completions: Sequence[Text], entry: Sequence[str], **kwargs: object) -> list[float]:
    """
    Return the task's score for the answer in each completion, from 0 to 1; 0 if scoring raises an error.

    A completion is text without special tokens, or a list of messages. Its answer is the last text between `<answer>`
    tags. Without tags, it is the last number if the right answer is a number, else the whole text. `entry` is the
    column of [`load_gym_task`].
    """
    return [_score(completion_text(completion), row) for completion, row in zip(completions, entry, strict=True)]


def read_answer(text: str, right_answer: str) -> str:
    """Return the answer in a text, as [`gym_reward`] extracts it, without surrounding spaces."""
    start = text.rfind("<answer>", 0, max(text.rfind("</answer>"), 0))
    if start >= 0:
        start += len("<answer>")
        return text[start : text.find("</answer>", start)].strip()
    return (last_number(text) or "") if NUMBER.fullmatch(right_answer.strip()) else text.strip()


def _score(text: str, row: str) -> float:
    problem = json.loads(row)
    task = _rebuild(problem["task"], json.dumps(problem["task_args"]))
    answer = read_answer(text, problem["entry"]["answer"] or "")
    try:
        return float(task.score_answer(answer, problem["entry"]))
    except Exception as error:  # each task has its own parser, and a model may write anything
        warnings.warn(f"The task '{problem['task']}' could not read an answer, so its reward is 0: {error!r}")
        return 0.0


@functools.cache
def _rebuild(name: str, task_args: str) -> Any:
    return _make(name, json.loads(task_args))


def _question(row: dict[str, Any]) -> str:
    return row["prompt"][0]["content"]


def _parse(task_args: str | dict[str, Any] | None) -> dict[str, Any]:
    if isinstance(task_args, str):
        try:
            given: dict[str, Any] = json.loads(task_args)
        except json.JSONDecodeError as error:
            raise InputError(
                f"`task_args` is '{task_args}', which is not JSON ({error}): write it like "
                """'{"min_terms": 2, "max_terms": 2}'."""
            ) from error
    else:
        given = task_args or {}
    return {"size": TRAIN_SIZE, "seed": 0, **given}


def _make(name: str, args: dict[str, Any]) -> Any:
    """Create a dataset of reasoning-gym."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise MissingPackageError(
            f"`dataset_name` is '{GYM_PREFIX}{name}', but the package reasoning-gym cannot be imported ({error}): "
            "pip install 'bapo-trl[reasoning-gym]', or choose another dataset."
        ) from error
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=1)
        known = f" (the nearest is {near[0]})" if near else f": choose one of {', '.join(sorted(DATASETS))}"
        raise InputError(f"`dataset_name` is '{GYM_PREFIX}{name}', but reasoning-gym has no such task{known}.")
    try:
        return reasoning_gym.create_dataset(name, **args)
    except (AssertionError, TypeError, ValueError) as error:  # each task has its own checks
        known = ", ".join(DATASETS[name][1].__dataclass_fields__)
        raise InputError(
            f"`task_args` is {json.dumps(args)}, which the task '{name}' does not accept ({error}): correct it. The "
            f"task's arguments are {known}."
        ) from error


def _problems(name: str, args: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for entry in _make(name, args):
        scored_by = {"task": name, "task_args": args, "entry": entry}
        rows.append(
            {
                "prompt": [{"role": "user", "content": entry["question"]}],
                "answer": entry["answer"] or "",
                "entry": json.dumps(scored_by, default=str),
            }
        )
    return rows


def _check_scores(row: dict[str, Any]) -> None:
    """Raise an `InputError` if a task rejects its own answer after its entry was converted to JSON and back."""
    problem = json.loads(row["entry"])
    answer = problem["entry"]["answer"]
    if answer and gym_reward([f"<answer>{answer}</answer>"], [row["entry"]])[0] < 1:
        raise InputError(
            f"`dataset_name` is '{GYM_PREFIX}{problem['task']}', whose entries cannot be stored as JSON: the right "
            "answer would get no reward. Choose another task."
        )
