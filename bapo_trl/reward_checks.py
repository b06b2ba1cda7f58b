"""What reward functions return, checked before TRL makes a tensor of it. Legend: `B` samples."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch

from .trl_compat import is_async_callable


LARGEST_REWARD = 1e18
"""Largest size of a reward: TRL squares rewards in float32, which ends at 3e38."""

_FIX = "return a finite number for each completion, or None where the function does not apply"


class RewardChecks:
    """
    Keeps the first error of the reward functions of a batch.

    The functions give 0 from then on, so that the run goes on to where its processes can stop together.

    Attributes:
        error (`Exception`, *optional*):
            What the function raised, with a note of which it was; or a `ValueError` that names function, sample,
            value and fix.
    """

    def __init__(self):
        self.error: Exception | None = None

    def wrap(self, function: Callable, name: str) -> Callable:
        """Return the reward function with its errors kept, asynchronous if it is."""
        if is_async_callable(function):

            @functools.wraps(function)
            async def checked_async(**inputs: Any) -> list[float | None]:
                if self.error is None:
                    try:
                        return check_rewards(await function(**inputs), name, inputs["prompts"], inputs["completions"])
                    except Exception as error:
                        self._keep(error, name, inputs)
                return [0.0] * len(inputs["prompts"])

            return checked_async

        @functools.wraps(function)
        def checked(**inputs: Any) -> list[float | None]:
            if self.error is None:
                try:
                    return check_rewards(function(**inputs), name, inputs["prompts"], inputs["completions"])
                except Exception as error:
                    self._keep(error, name, inputs)
            return [0.0] * len(inputs["prompts"])

        return checked

    def check_model(
        self, rewards: torch.Tensor, name: str, prompts: Sequence[Any], completions: Sequence[Any]
    ) -> None:
        """Check the rewards that a reward model gave, shape `(B,)`."""
        if self.error is None:
            try:
                check_rewards(rewards, name, prompts, completions)
            except ValueError as error:
                self.error = error

    def _keep(self, error: Exception, name: str, inputs: Mapping[str, Any]) -> None:
        if not isinstance(error, BadRewardError):
            columns = ", ".join(key for key, value in inputs.items() if isinstance(value, list))
            error.add_note(
                f"Raised by the reward function `{name}` on {len(inputs['prompts'])} samples, the first of them "
                f"{_describe(inputs['prompts'], inputs['completions'], 0)}. It was given the columns {columns}."
            )
        self.error = error


class BadRewardError(ValueError):
    """A reward function returned what is no reward."""


def check_rewards(returned: Any, name: str, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float | None]:
    """
    Return the rewards as numbers.

    Args:
        returned:
            What a reward function returned for `B` samples: numbers, with `None` where it does not apply.
        name (`str`):
            Name of the function.
        prompts, completions (sequences):
            The samples.

    Raises:
        BadRewardError: If these are no `B` finite numbers of at most [`LARGEST_REWARD`]. Names function and sample.

    Example:

    ```python
    >>> check_rewards([1, None], "is_short", ["1+1=", "1+2="], ["2", "3"])
    [1.0, None]

    ```
    """
    count = len(prompts)
    if isinstance(returned, (torch.Tensor, np.ndarray)) and returned.ndim == 1:
        returned = returned.tolist()
    if isinstance(returned, (str, bytes, Mapping, Set)) or not hasattr(returned, "__iter__"):
        raise BadRewardError(
            f"The reward function `{name}` returned {_short(returned)}, a {type(returned).__name__}, for {count} "
            f"samples: {_FIX}, in a list."
        )
    rewards = list(returned)
    if len(rewards) != count:
        raise BadRewardError(
            f"The reward function `{name}` returned {len(rewards)} rewards for {count} samples: {_FIX}."
        )
    for position, reward in enumerate(rewards):
        if reward is None:
            continue
        number = _as_number(reward)
        if number is None or not abs(number) <= LARGEST_REWARD:
            limit = f" of at most {LARGEST_REWARD:g}" if number is not None and math.isfinite(number) else ""
            what = _short(reward) if number is not None else f"{_short(reward)}, a {type(reward).__name__},"
            raise BadRewardError(
                f"The reward function `{name}` returned {what} for sample {position} of {count}, "
                f"{_describe(prompts, completions, position)}: {_FIX.replace('number', f'number{limit}', 1)}."
            )
        rewards[position] = number
    return rewards


def _as_number(reward: Any) -> float | None:
    if isinstance(reward, (str, bytes)) or getattr(reward, "ndim", 0) != 0:
        return None
    try:
        return float(reward)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def _describe(prompts: Sequence[Any], completions: Sequence[Any], position: int) -> str:
    return f"prompt {_short(_text(prompts[position]))}, completion {_short(_text(completions[position]))}"


def _text(value: Any) -> Any:
    """Return the last message of a chat, or what is no chat."""
    is_chat = isinstance(value, list) and value and isinstance(value[-1], dict)
    return value[-1].get("content") if is_chat else value


def _short(value: Any, length: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= length else f"{text[: length - 3]}..."
