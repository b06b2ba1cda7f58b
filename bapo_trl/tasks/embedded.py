"""What an embedded task consists of."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from datasets import Dataset


NUM_TEST_PROBLEMS = 512


class RewardFunc(Protocol):
    """A reward function as TRL calls it, for plain-string completions."""

    __name__: str

    def __call__(self, completions: list[str], answer: list[str], **kwargs: Any) -> list[float]: ...


@dataclass(frozen=True)
class EmbeddedTask:
    """
    Problems to train on, problems held out, the reward that checks an answer, and the pupil to begin with.

    Attributes:
        train_dataset ([`~datasets.Dataset`]):
            Problems with the string columns `prompt` and `answer`.
        test_dataset ([`~datasets.Dataset`]):
            Problems with the same columns; none of them is in `train_dataset`.
        reward_func (`RewardFunc`):
            1.0 for a correct completion, 0.0 for any other.
        max_new_tokens (`int`):
            Longest completion, with its end token, that training and evaluation should allow.
        demonstrate (`Callable[[str, random.Random], str]`):
            Completion that a careless pupil gives to a prompt; the warm start learns from these.
    """

    train_dataset: Dataset
    test_dataset: Dataset
    reward_func: RewardFunc
    max_new_tokens: int
    demonstrate: Callable[[str, random.Random], str]


def as_dataset(prompts: list[str], answers: list[str]) -> Dataset:
    """Return a dataset with the columns `prompt` and `answer`."""
    return Dataset.from_dict({"prompt": prompts, "answer": answers})
