"""The pupils of the embedded tasks: tokenizer, model and warm start of each task."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .embedded import EmbeddedTask
from .running_totals import ALPHABET, load_running_totals
from .sums import load_sums


@dataclass(frozen=True)
class Pupil:
    """
    How the model that RL starts from is made.

    Attributes:
        load_task (`Callable[[int], EmbeddedTask]`):
            Makes the task from a seed.
        num_steps (`int`):
            Optimizer updates. A fixed number, not an accuracy to reach, so that a seed always gives the same weights.
        batch_size (`int`):
            Demonstrations an update.
        learning_rate (`float`):
            Peak learning rate of AdamW.
        warmup_steps (`int`):
            Updates over which the learning rate rises from 0.
        decays (`bool`):
            Whether the learning rate falls to 0 over the second half of the updates.
        alphabet (`str` or `None`):
            Characters of the tokenizer; `None` for all bytes.
        model (`Mapping[str, int]`):
            Settings of the model that differ from those of [`tiny_model`].
    """

    load_task: Callable[[int], EmbeddedTask]
    num_steps: int = 600
    batch_size: int = 128
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    decays: bool = False
    alphabet: str | None = None
    model: Mapping[str, int] = field(default_factory=dict)


PUPILS = {
    "sums": Pupil(load_sums),
    "running_totals": Pupil(
        load_running_totals,
        num_steps=2000,
        batch_size=64,
        learning_rate=5e-3,
        decays=True,
        alphabet=ALPHABET,
        model={
            "hidden_size": 32,
            "intermediate_size": 96,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "max_position_embeddings": 128,
        },
    ),
}


def load_task(seed: int = 0, name: str = "sums") -> EmbeddedTask:
    """
    Make an embedded task from a seed.

    Args:
        seed (`int`, *optional*, defaults to `0`):
            Seed of the problems and of their split into train and test.
        name (`str`, *optional*, defaults to `"sums"`):
            `"sums"` of two numbers (easy: right and wrong answers are of one length), or `"running_totals"` of seven
            digits (hard: several steps, few right answers at the start, wrong ones longer).

    Returns:
        [`EmbeddedTask`]: Its datasets, reward and demonstrations.

    Raises:
        ValueError: If there is no such task.
    """
    return pupil_of(name).load_task(seed)


def pupil_of(name: str) -> Pupil:
    """Return the pupil of a task, or raise `ValueError` if there is no such task."""
    if name not in PUPILS:
        raise ValueError(f"The task is {name!r}: set it to one of {sorted(PUPILS)}.")
    return PUPILS[name]
