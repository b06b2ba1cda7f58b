"""Tasks that are made here, from a name, instead of loaded."""

from collections.abc import Callable
from dataclasses import dataclass

from datasets import Dataset


@dataclass(frozen=True)
class MadeTask:
    """
    Problems to train on, problems held out, and the reward that checks a completion.

    Attributes:
        title (`str`): What the terminal calls it.
        train_dataset ([`~datasets.Dataset`]): Problems with `prompt` (messages), `answer`, and what the reward needs
            besides.
        test_dataset ([`~datasets.Dataset`]): Problems with the same columns; none of their prompts is in
            `train_dataset`.
        reward_func (`Callable`): Reward function as TRL calls it, a module's own.
    """

    title: str
    train_dataset: Dataset
    test_dataset: Dataset
    reward_func: Callable[..., list[float]]
