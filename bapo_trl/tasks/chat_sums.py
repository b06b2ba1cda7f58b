"""Sums of two numbers below 100, asked of a chat model: the task of `make demo-llm`."""

from datasets import Dataset

from .answers import last_number_reward
from .made import MadeTask
from .sums import load_task


CHAT_SUMS = "chat_sums"
"""What `--dataset_name` calls it."""

INSTRUCTION = "Answer in one short sentence."


def load_chat_sums(seed: int = 0) -> MadeTask:
    """
    Ask the sums of [`load_task`] in words: the same problems, split in the same way.

    A prompt is an instruction and the question "What is 59 + 19?". The last number of a completion counts.

    Args:
        seed (`int`, *optional*, defaults to `0`): Seed of the shuffle and the split.

    Returns:
        [`MadeTask`]: 9,488 problems to train on and 512 or 513 held out, with the columns `prompt` (messages) and
        `answer`.
    """
    sums = load_task(seed)
    return MadeTask(
        "sums of two numbers, asked in words",
        _ask_all(sums.train_dataset),
        _ask_all(sums.test_dataset),
        last_number_reward,
    )


def ask(a: int | str, b: int | str) -> list[dict[str, str]]:
    """Return the prompt that asks for a sum."""
    return [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": f"What is {a} + {b}?"}]


def _ask_all(problems: Dataset) -> Dataset:
    prompts = [ask(*problem.rstrip("=").split("+")) for problem in problems["prompt"]]
    return Dataset.from_dict({"prompt": prompts, "answer": problems["answer"]})
