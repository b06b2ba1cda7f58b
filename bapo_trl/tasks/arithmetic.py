"""The embedded task: sums of two numbers below 100, checked exactly."""

import random
from dataclasses import dataclass
from typing import Any, Protocol

from datasets import Dataset


LARGEST_NUMBER = 99
NUM_TEST_PROBLEMS = 512
MAX_ANSWER_CHARACTERS = len(str(2 * LARGEST_NUMBER))


class RewardFunc(Protocol):
    """A reward function as TRL calls it, for plain-string completions."""

    __name__: str

    def __call__(self, completions: list[str], answer: list[str], **kwargs: Any) -> list[float]: ...


@dataclass(frozen=True)
class EmbeddedTask:
    """
    Problems to train on, problems held out, and the reward that checks an answer.

    Attributes:
        train_dataset ([`~datasets.Dataset`]):
            Problems with the string columns `prompt` and `answer`.
        test_dataset ([`~datasets.Dataset`]):
            Problems with the same columns; none of them is in `train_dataset`.
        reward_func (`RewardFunc`):
            1.0 for a correct completion, 0.0 for any other.
    """

    train_dataset: Dataset
    test_dataset: Dataset
    reward_func: RewardFunc


def exact_match_reward(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """
    Reward a completion that is the answer and nothing else.

    Args:
        completions (`list[str]`):
            Generated texts without special tokens.
        answer (`list[str]`):
            The right answer of each completion's prompt.
        **kwargs:
            Further columns and arguments TRL passes; unused.

    Returns:
        `list[float]`: 1.0 for an exact match, else 0.0; empty for no completions.

    Example:

    ```python
    >>> exact_match_reward(["95", "095", "9"], answer=["95", "95", "95"])
    [1.0, 0.0, 0.0]

    ```
    """
    return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]


def load_task(seed: int = 0) -> EmbeddedTask:
    """
    Make the sums: every ordered pair of numbers from 0 to 99 once, shuffled and split into train and test.

    A problem reads `"37+58="`, its answer `"95"`. `58+37` is a problem of its own, but always lies in the same split
    as `37+58`, so that no test answer can be recalled by swapping the numbers.

    Args:
        seed (`int`, *optional*, defaults to `0`):
            Seed of the shuffle and the split.

    Returns:
        [`EmbeddedTask`]: 9,488 problems to train on and 512 or 513 held out.
    """
    rng = random.Random(seed)
    unordered = [(small, large) for large in range(LARGEST_NUMBER + 1) for small in range(large + 1)]
    rng.shuffle(unordered)
    problems: list[tuple[int, int]] = []
    num_test = 0
    for small, large in unordered:
        problems += [(small, large)] if small == large else [(small, large), (large, small)]
        if not num_test and len(problems) >= NUM_TEST_PROBLEMS:
            num_test = len(problems)
    test, train = problems[:num_test], problems[num_test:]
    rng.shuffle(train)
    return EmbeddedTask(_as_dataset(train), _as_dataset(test), exact_match_reward)


def _as_dataset(problems: list[tuple[int, int]]) -> Dataset:
    return Dataset.from_dict(
        {"prompt": [f"{a}+{b}=" for a, b in problems], "answer": [str(a + b) for a, b in problems]}
    )
