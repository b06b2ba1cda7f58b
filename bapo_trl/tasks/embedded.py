"""What a task that is made here consists of."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from datasets import Dataset


NUM_TEST_PROBLEMS = 512


@dataclass(frozen=True)
class WarmStart:
    """How the model that RL starts from is made: supervised, from demonstrations with mistakes."""

    demonstrate: Callable[[str, random.Random], str]  # writes the completion of a careless demonstrator to a prompt
    num_steps: int = 600  # updates: a fixed number, not an accuracy to reach, so that a seed gives the same weights
    batch_size: int = 128  # demonstrations an update
    learning_rate: float = 3e-3  # at its peak, of AdamW
    warmup_steps: int = 50  # updates over which the learning rate rises from 0
    decays: bool = False  # whether the learning rate falls to 0 over the second half of the updates
    alphabet: str | None = None  # characters of the tokenizer; `None` for all bytes
    model: Mapping[str, int] = field(default_factory=dict)  # settings that differ from those of `tiny_model`
    # What the model learns before, from other demonstrations; its `alphabet`, `model` and `first_lesson` are not read
    first_lesson: "WarmStart | None" = None


@dataclass(frozen=True)
class MadeTask:
    """Problems to train on, problems held out, and the reward that checks a completion."""

    name: str  # for the terminal; of an embedded task, what the folders of its warm start begin with
    train_dataset: Dataset  # with `prompt`, `answer`, and what the reward needs besides
    test_dataset: Dataset  # with the same columns; none of its prompts is in `train_dataset`
    reward_func: Callable[..., list[float]]  # as TRL calls it, a module's own; 1.0 for a right completion


@dataclass(frozen=True)
class EmbeddedTask(MadeTask):
    """A task in plain text, and the model to begin with."""

    max_new_tokens: int  # longest completion, with its end token, that training and evaluation should allow
    warm_start: WarmStart  # how the model to begin with is made


def as_dataset(prompts: list[str], answers: list[str]) -> Dataset:
    """Return a dataset with the columns `prompt` and `answer`."""
    return Dataset.from_dict({"prompt": prompts, "answer": answers})
