"""Checks of rewards that TRL would train on without an error, such as infinity or the keys of a dictionary."""

import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.trainer_utils import has_length

from ..batch.reward_sums import best_of_k
from ..errors import InputError
from ..parts import Part
from ..upstream.fixes import restoring
from ..upstream.trl_compat import is_async_callable
from .prompt_checks import start_of


_FIX = "return a finite number for each completion, or None where the function does not apply"


class CheckedRewards(Part):
    """The rewards of a trainer, checked, and passed on to its parts. The best of each evaluated group is logged."""

    def reset(self, run):
        self._run, self._rows_left = run, sys.maxsize  # of an evaluation, over all ranks
        vars(run)["_calculate_rewards"] = self._calculate  # which TRL calls, whatever a subclass overrides

    def before_evaluation(self, dataloader):
        rows = dataloader.dataset
        self._rows_left = len(rows) * self._run.num_generations_eval if has_length(rows) else sys.maxsize

    def _calculate(self, inputs, prompts, completions, *args, **kwargs) -> torch.Tensor:
        run = self._run
        with run.phase_clock.phase("rewards"), checking_rewards(run, len(prompts)):
            rewards_per_func = type(run)._calculate_rewards(run, inputs, prompts, completions, *args, **kwargs)
        check_rewards(run, rewards_per_func, prompts, completions)
        counted, is_evaluation = rewards_per_func, not run.model.training
        if is_evaluation:  # a batch on several ranks is filled with repeats
            counted = rewards_per_func[: self._rows_left]
            self._rows_left -= len(counted)
        for part in run.parts:
            part.take_rewards(counted, is_evaluation)
        return rewards_per_func

    def take_rewards(self, rewards_per_func, is_evaluation):
        count = self._run.num_generations_eval
        if is_evaluation and count > 1:  # TRL logs the mean
            best = best_of_k(rewards_per_func, self._run.reward_weights, count)
            self._run._metrics["eval"][f"reward_best_of_{count}"] += best.tolist()


@contextmanager
def checking_rewards(trainer: Any, count: int) -> Iterator[None]:
    """Raise an `InputError`, in this context, if a reward function does not return `count` rewards."""
    with restoring([trainer], "reward_funcs"):
        trainer.reward_funcs = [
            function if isinstance(function, nn.Module) else _checked(function, name, count)
            for function, name in zip(trainer.reward_funcs, trainer.reward_func_names, strict=True)
        ]
        yield


def _checked(function: Callable, name: str, count: int) -> Callable:
    def take(returned: Any) -> Any:
        if isinstance(returned, Iterator):  # it is read twice
            returned = list(returned)
        defect = rewards_defect(returned, count)
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


def rewards_defect(returned: Any, count: int) -> str | None:
    """Return why a value is not `count` rewards, as text to follow "returned"; `None` if it is."""
    what = f"{start_of(returned)}, a {type(returned).__name__}, for {count} samples"
    # TRL would treat keys and bytes as rewards
    if isinstance(returned, (str, bytes, bytearray, Mapping, Set)) or not hasattr(returned, "__iter__"):
        return f"{what}: {_FIX}, in a list"
    if isinstance(returned, torch.Tensor) and returned.shape == (count,):  # avoids copying each number from a device
        return None
    try:  # as TRL does
        rewards = torch.tensor([math.nan if reward is None else reward for reward in returned], dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        return f"{what}, which torch cannot convert to numbers ({error}): {_FIX}"
    if rewards.shape != (count,):
        return f"{len(rewards)} rewards for {count} samples, of shape {tuple(rewards.shape)}: {_FIX}"
    return None


def check_rewards(trainer: Any, rewards_per_func: torch.Tensor, prompts: Sequence[Any], completions: Sequence[Any]):
    """
    Raise an `InputError`, the same on all ranks, if a reward is infinite.

    `rewards_per_func`, of shape `(B, F)`, covers all ranks, with NaN where a function returned no reward; `prompts`
    and `completions` cover this rank.
    """
    is_infinite = rewards_per_func.isinf()
    if not is_infinite.any():
        return
    row, column = divmod(int(is_infinite.int().argmax()), len(trainer.reward_func_names))
    rank, position = divmod(row, len(prompts))
    where = f"on rank {rank}"
    if rank == trainer.accelerator.process_index:
        where = f"prompt {start_of(prompts[position])}, completion {start_of(completions[position])}"
    raise InputError(
        f"The reward function `{trainer.reward_func_names[column]}` returned {rewards_per_func[row, column]:g} for "
        f"sample {position} of {len(prompts)}, {where}: {_FIX}."
    )


def distinct_names(names: Sequence[str]) -> list[str]:
    """
    Return the names of reward functions, with a number appended to each name that occurs more than once.

    TRL logs rewards by name, and would mix the rewards of functions with the same name.
    """
    distinct: list[str] = []
    for name in names:
        numbered = (f"{name}_{number}" for number in itertools.count(1))
        free = (each for each in numbered if each not in names and each not in distinct)
        distinct.append(name if names.count(name) == 1 else next(free))
    return distinct
