"""Rewards that a run cannot use: infinite ones, and what TRL could make no numbers of. Legend: `B` samples."""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch

from ..errors import InputError
from ..upstream.trl_compat import is_async_callable
from .prompt_checks import start_of


_SILENT = (Mapping, Set, bytes, bytearray, memoryview)  # TRL would take their keys or bytes for rewards
_FIX = "return a finite number for each completion, or None where the function does not apply"


def checked(function: Callable, name: str, prompts: Sequence[Any], completions: Sequence[Any]) -> Callable:
    """
    Return a reward function, asynchronous if it is, that refuses to return what is no reward for each completion.

    TRL would train on the keys of a mapping, and give all completions a single reward.
    """

    def take(returned: Any) -> Any:
        if isinstance(returned, Iterator):  # to be read twice
            returned = list(returned)
        defect = rewards_defect(returned, prompts, completions)
        if defect is not None:
            raise InputError(f"The reward function `{name}` returned {defect}.")
        return returned

    @functools.wraps(function)
    def taken(**inputs: Any) -> Any:
        return take(function(**inputs))

    @functools.wraps(function)
    async def taken_async(**inputs: Any) -> Any:
        return take(await function(**inputs))

    return taken_async if is_async_callable(function) else taken


def distinct_names(names: Sequence[str]) -> list[str]:
    """
    Return the names of reward functions, with a number behind those that are there more than once.

    TRL logs by name, and would log the rewards of functions of one name as those of one function.

    Example:

    ```python
    >>> distinct_names(["score", "length", "score", "score_1"])
    ['score_2', 'length', 'score_3', 'score_1']

    ```
    """
    distinct: list[str] = []
    for name in names:
        numbered = (f"{name}_{number}" for number in itertools.count(1))
        free = (each for each in numbered if each not in names and each not in distinct)
        distinct.append(name if names.count(name) == 1 else next(free))
    return distinct


def check_size_of_rewards(
    rewards_per_func: torch.Tensor,
    overflows: Callable[[torch.Tensor], torch.Tensor] | None,
    names: Sequence[str],
    prompts: Sequence[Any],
    completions: Sequence[Any],
    rank: int,
) -> None:
    """
    Refuse rewards of which TRL would compute undefined or no advantages (`InputError`). All ranks refuse the same.

    The rewards are of the samples of all ranks, NaN where a function gave none; prompts and completions of this one.
    `overflows` takes finite ones, and tells the samples whose standard deviation overflows; `None` where no advantages
    are made of them.
    """
    sizes, fix = rewards_per_func.abs().nan_to_num(nan=0.0, posinf=torch.inf), _FIX
    if not sizes.isinf().any():
        too_large = None if overflows is None else overflows(rewards_per_func)
        if too_large is None or not too_large.any():
            return
        sizes = sizes * too_large.unsqueeze(1)
        fix = "the standard deviation of these rewards overflows, and nothing would be learned. Return smaller numbers"
    row, column = divmod(int(sizes.argmax()), len(names))
    of_rank, position = divmod(row, len(prompts))
    is_here = of_rank == rank
    where = _describe(prompts, completions, position) if is_here else f"on rank {of_rank}"
    raise InputError(
        f"The reward function `{names[column]}` returned {rewards_per_func[row, column]:g} for sample {position} of "
        f"{len(prompts)}, {where}: {fix}."
    )


def rewards_defect(returned: Any, prompts: Sequence[Any], completions: Sequence[Any]) -> str | None:
    """Return what keeps TRL from making `B` rewards of a value, in words that follow "returned"; else `None`."""
    count = len(prompts)
    is_one_value = not hasattr(returned, "__iter__") or getattr(returned, "ndim", 1) == 0  # as an array may be
    if is_one_value or isinstance(returned, (str, *_SILENT)):
        return f"{start_of(returned)}, a {type(returned).__name__}, for {count} samples: {_FIX}, in a list"
    if isinstance(returned, torch.Tensor) and returned.shape == (count,):  # not number by number from a device
        return None
    rewards = list(returned)
    if len(rewards) != count:
        return f"{len(rewards)} rewards for {count} samples: {_FIX}"
    for position, reward in enumerate(rewards):
        if reward is not None and not _is_number(reward):
            return (
                f"{start_of(reward)}, a {type(reward).__name__}, for sample {position} of {count}, "
                f"{_describe(prompts, completions, position)}: {_FIX}"
            )
    return None


def _is_number(reward: Any) -> bool:
    if isinstance(reward, (str, bytes)) or (isinstance(reward, np.ndarray) and reward.ndim):
        return False
    try:
        float(reward)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return False
    return True


def _describe(prompts: Sequence[Any], completions: Sequence[Any], position: int) -> str:
    return f"prompt {start_of(_text(prompts[position]))}, completion {start_of(_text(completions[position]))}"


def _text(value: Any) -> Any:
    """Return the last message of a chat, or what is no chat."""
    is_chat = isinstance(value, list) and value and isinstance(value[-1], dict)
    return value[-1].get("content") if is_chat else value
