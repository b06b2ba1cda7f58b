"""What a task that is made here consists of."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from datasets import Dataset


NUM_TEST_PROBLEMS = 512


@dataclass(frozen=True)
class WarmStart:
    """
    How the model that RL starts from is made: supervised, from demonstrations with mistakes.

    Attributes:
        demonstrate (`Callable[[str, random.Random], str]`): Writes the completion of a careless demonstrator to a
            prompt.
        num_steps (`int`): Optimizer updates. A fixed number, not an accuracy to reach, so that a seed always gives the
            same weights.
        batch_size (`int`): Demonstrations an update.
        learning_rate (`float`): Peak learning rate of AdamW.
        warmup_steps (`int`): Updates over which the learning rate rises from 0.
        decays (`bool`): Whether the learning rate falls to 0 over the second half of the updates.
        alphabet (`str` or `None`): Characters of the tokenizer; `None` for all bytes.
        model (`Mapping[str, int]`): Settings of the model that differ from those of [`tiny_model`].
        first_lesson (`WarmStart`, *optional*): What the same model learns before, from other demonstrations. Its
            `alphabet`, `model` and `first_lesson` are not read.
    """

    demonstrate: Callable[[str, random.Random], str]
    num_steps: int = 600
    batch_size: int = 128
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    decays: bool = False
    alphabet: str | None = None
    model: Mapping[str, int] = field(default_factory=dict)
    first_lesson: "WarmStart | None" = None


@dataclass(frozen=True)
class MadeTask:
    """
    Problems to train on, problems held out, and the reward that checks a completion.

    Attributes:
        name (`str`): What the terminal calls it; of an embedded task, what the folders of its warm start begin with.
        train_dataset ([`~datasets.Dataset`]): Problems with `prompt`, `answer`, and what the reward needs besides.
        test_dataset ([`~datasets.Dataset`]): Problems with the same columns; none of their prompts is in
            `train_dataset`.
        reward_func (`Callable`): Reward function as TRL calls it, a module's own; 1.0 for a right completion.
    """

    name: str
    train_dataset: Dataset
    test_dataset: Dataset
    reward_func: Callable[..., list[float]]


@dataclass(frozen=True)
class EmbeddedTask(MadeTask):
    """
    A task in plain text, and the model to begin with.

    Attributes:
        max_new_tokens (`int`): Longest completion, with its end token, that training and evaluation should allow.
        warm_start ([`WarmStart`]): How the model to begin with is made.
    """

    max_new_tokens: int
    warm_start: WarmStart


def as_dataset(prompts: list[str], answers: list[str]) -> Dataset:
    """Return a dataset with the columns `prompt` and `answer`."""
    return Dataset.from_dict({"prompt": prompts, "answer": answers})
