"""Sums of two numbers below 100: as plain text for the tiny model of the demo, and as questions to a chat model."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset

from ..evaluation.answers import Text, completion_text, last_number, same_number


CHAT_SUMS = "chat_sums"
"""Name of the sums for chat models, for `--dataset_name`."""

LARGEST_NUMBER = 99
NUM_TEST_PROBLEMS = 512


@dataclass(frozen=True)
class MadeTask:
    """
    A synthetic task.

    Attributes:
        name (`str`):
            Name to show.
        train_dataset (`Dataset`):
            Problems to train on, with the columns `prompt`, `answer` and whatever else the reward needs.
        test_dataset (`Dataset`):
            Held-out problems with the same columns; none of them is in `train_dataset`.
        reward_func (`Callable[..., list[float]]`):
            Reward function for TRL; 1.0 for a right completion.
    """

    name: str
    train_dataset: Dataset
    test_dataset: Dataset
    reward_func: Callable[..., list[float]]  # a function of a module: processes find it by its name


def exact_match_reward(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """
    Return 1.0 for each completion (text without special tokens) that equals the answer exactly, else 0.0.

    Example:

    ```python
    >>> exact_match_reward(["95", "095", "9", "95 ", ""], answer=["95"] * 5)
    [1.0, 0.0, 0.0, 0.0, 0.0]

    ```
    """
    return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]


def last_number_reward(completions: Sequence[Text], answer: Sequence[Any], **kwargs: object) -> list[float | None]:
    """Return 1.0 for each completion whose last number is right, else 0.0; `None` if `answer` has no number."""
    golds = [last_number(str(right)) for right in answer]
    return [
        None if gold is None else float(same_number(last_number(completion_text(completion)), gold))
        for completion, gold in zip(completions, golds, strict=True)
    ]


def sums_model_path() -> Path:
    """
    Return the folder of the tiny model and tokenizer that training on the sums starts from.

    The model was trained on demonstrations that forget three of four carries, by `benchmarks/warm_start.py`.
    """
    return Path(__file__).with_name("sums_model")


def load_task(seed: int = 0) -> MadeTask:
    """
    Create the sums task: every ordered pair of numbers from 0 to 99 once, shuffled and split into train and test.

    A prompt is `"37+58="`, its answer `"95"`. `37+58=` and `58+37=` are two problems in the same split: no test answer
    can be recalled by swapping the numbers. 512 or 513 of the 10,000 problems are held out.
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
    return MadeTask(
        name="sums",
        train_dataset=_write(train),
        test_dataset=_write(test),
        reward_func=exact_match_reward,
    )


def load_chat_sums(seed: int = 0) -> MadeTask:
    """
    Create the sums of [`load_task`] as questions for a chat model: the same problems in the same splits.

    A `prompt` is a list of messages: an instruction and a question such as "What is 59 + 19?". The reward compares the
    last number of the completion with the `answer`.
    """
    sums = load_task(seed)
    train, test = _ask_all(sums.train_dataset), _ask_all(sums.test_dataset)
    return MadeTask("sums of two numbers, asked in words", train, test, last_number_reward)


def ask(a: int | str, b: int | str) -> list[dict[str, str]]:
    """Return the chat prompt that asks for a sum."""
    instruction = "Answer in one short sentence."
    return [{"role": "system", "content": instruction}, {"role": "user", "content": f"What is {a} + {b}?"}]


def _write(problems: list[tuple[int, int]]) -> Dataset:
    prompts, answers = [f"{a}+{b}=" for a, b in problems], [str(a + b) for a, b in problems]
    return Dataset.from_dict({"prompt": prompts, "answer": answers})


def _ask_all(problems: Dataset) -> Dataset:
    prompts = [ask(*problem.rstrip("=").split("+")) for problem in problems["prompt"]]
    return Dataset.from_dict({"prompt": prompts, "answer": problems["answer"]})
