"""What a task that is made here consists of."""

from collections.abc import Callable
from dataclasses import dataclass

from datasets import Dataset


@dataclass(frozen=True)
class MadeTask:
    """Problems to train on, problems held out, and the reward that checks a completion."""

    name: str  # for the terminal
    train_dataset: Dataset  # with `prompt`, `answer`, and what the reward needs besides
    test_dataset: Dataset  # with the same columns; none of its prompts is in `train_dataset`
    reward_func: Callable[..., list[float]]  # as TRL calls it, a module's own; 1.0 for a right completion
