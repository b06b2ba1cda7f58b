"""Resolve the reward functions that `train_bapo.py` is told by name."""

import importlib
import os
import sys
from collections.abc import Callable, Sequence

from trl.rewards import (
    accuracy_reward,
    get_soft_overlong_punishment,
    reasoning_accuracy_reward,
    think_format_reward,
)


REWARDS: dict[str, Callable] = {
    "accuracy_reward": accuracy_reward,
    "reasoning_accuracy_reward": reasoning_accuracy_reward,
    "think_format_reward": think_format_reward,
    "get_soft_overlong_punishment": get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256),
}
"""TRL's reward functions by the names that TRL's own scripts give them."""


def resolve_reward_funcs(names: Sequence[str]) -> list[Callable]:
    """
    Return the reward functions of the given names.

    Args:
        names (sequence of `str`):
            Names in [`REWARDS`], or import paths `package.module.function`; modules in the working directory count.

    Raises:
        ValueError: If a name is neither known nor importable.
    """
    return [REWARDS[name] if name in REWARDS else _import_function(name) for name in names]


def _import_function(name: str) -> Callable:
    module_name, _, function_name = name.rpartition(".")
    if not module_name:
        raise ValueError(
            f"`reward_funcs` has '{name}', which is not known: choose one of {', '.join(REWARDS)}, or give an import "
            "path such as 'my_package.rewards.my_reward'."
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"`reward_funcs` has '{name}', which cannot be imported ({error}): check the path and run from the folder "
            "that holds it, or install its package."
        ) from error
    if not callable(function):
        raise ValueError(f"`reward_funcs` has '{name}', which is not a function.")
    return function
