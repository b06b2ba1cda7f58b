"""Sums of two numbers below 100: the task of the demo, checked exactly, and the same asked of a chat model."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset

from ..evaluation.answers import Text, completion_text, last_number, same_number


CHAT_SUMS = "chat_sums"
"""What `--dataset_name` calls the sums that are asked in words."""

LARGEST_NUMBER = 99
NUM_TEST_PROBLEMS = 512


@dataclass(frozen=True)
class MadeTask:
    """Problems to train on, problems held out, and the reward that checks a completion."""

    name: str  # for the terminal
    train_dataset: Dataset  # with `prompt`, `answer`, and what the reward needs besides
    test_dataset: Dataset  # with the same columns; none of its prompts is in `train_dataset`
    reward_func: Callable[..., list[float]]  # as TRL calls it, a module's own; 1.0 for a right completion


def exact_match_reward(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """
    Reward a completion, a text without special tokens, that is the answer to its prompt and nothing else.

    Example:

    ```python
    >>> exact_match_reward(["95", "095", "9", "95 ", ""], answer=["95"] * 5)
    [1.0, 0.0, 0.0, 0.0, 0.0]

    ```
    """
    return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]


def last_number_reward(completions: Sequence[Text], answer: Sequence[Any], **kwargs: object) -> list[float | None]:
    """Reward a completion whose last number is the right one; `None` where `answer` has no number."""
    golds = [last_number(str(right)) for right in answer]
    return [
        None if gold is None else float(same_number(last_number(completion_text(completion)), gold))
        for completion, gold in zip(completions, golds, strict=True)
    ]


def sums_model_path() -> Path:
    """
    Return the folder of the model that training on the sums starts from, with its tokenizer.

    It has learned from demonstrations that forget three carries in four. `benchmarks/warm_start.py` made its weights.
    """
    return Path(__file__).with_name("sums_model")


def load_task(seed: int = 0) -> MadeTask:
    """
    Make the sums: every ordered pair of numbers from 0 to 99 once, shuffled and split into train and test.

    A problem reads `"37+58="`, its answer `"95"`. `58+37` is a problem of its own, but always lies in the same split
    as `37+58`, so that no test answer can be recalled by swapping the numbers. Of the 10,000, 512 or 513 are held out.
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
    Ask the sums of [`load_task`] in words: the same problems, split in the same way.

    A `prompt` is messages: an instruction and the question "What is 59 + 19?". The last number of a completion is
    compared with the `answer`.
    """
    sums = load_task(seed)
    train, test = _ask_all(sums.train_dataset), _ask_all(sums.test_dataset)
    return MadeTask("sums of two numbers, asked in words", train, test, last_number_reward)


def ask(a: int | str, b: int | str) -> list[dict[str, str]]:
    """Return the prompt that asks for a sum."""
    instruction = "Answer in one short sentence."
    return [{"role": "system", "content": instruction}, {"role": "user", "content": f"What is {a} + {b}?"}]


def _write(problems: list[tuple[int, int]]) -> Dataset:
    prompts, answers = [f"{a}+{b}=" for a, b in problems], [str(a + b) for a, b in problems]
    return Dataset.from_dict({"prompt": prompts, "answer": answers})


def _ask_all(problems: Dataset) -> Dataset:
    prompts = [ask(*problem.rstrip("=").split("+")) for problem in problems["prompt"]]
    return Dataset.from_dict({"prompt": prompts, "answer": problems["answer"]})
