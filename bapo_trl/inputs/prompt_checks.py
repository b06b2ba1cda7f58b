"""Checks of the datasets that a trainer is given, and of their prompts. What is no dataset at all is left to TRL."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from datasets import Dataset, IterableDataset

from ..errors import InputError


_ROWS_PER_READ = 10_000
GIVEN_TO_REWARDS = frozenset(("prompts", "completions", "trainer_state", "log_extra", "log_metric"))
"""Names under which TRL gives reward functions values of its own, besides the columns of the dataset."""


@dataclass(frozen=True)
class TokenLimits:
    """What a model takes, in tokens; `None` for what its configuration does not tell."""

    window: int | None  # of a prompt with its completion
    completion: int  # `max_completion_length`
    vocabulary: int | None

    @property
    def longest_prompt(self) -> int | None:
        """Largest number of tokens of a prompt; `None` for no limit."""
        return None if self.window is None else self.window - self.completion

    @property
    def why_too_long(self) -> str:
        """Why a prompt is too long, and the fix, in words that follow the number of its tokens."""
        return (
            f"but the model's window of {self.window} (`max_position_embeddings`) leaves {self.longest_prompt} before "
            f"a completion of `max_completion_length` {self.completion}. No prompt is cut: leave such rows out with "
            "`dataset.filter`, lower `max_completion_length`, or take a model with a larger window."
        )


def check_number_of_prompts(train_dataset, args: Any) -> None:
    """
    Refuse a dataset that does not fill one generation over all processes (`InputError`).

    TRL leaves out an incomplete one, and would train nothing. A stream, whose length is not known, passes.
    """
    needed = args.generation_batch_size // args.num_generations
    if isinstance(train_dataset, Dataset) and len(train_dataset) < needed:
        raise InputError(
            f"The train dataset has {len(train_dataset)} prompts, but one generation takes {needed} "
            f"(`generation_batch_size` {args.generation_batch_size} / `num_generations` {args.num_generations}, over "
            f"all processes): nothing would be trained. Give at least {needed} prompts, or lower "
            f"`steps_per_generation` ({args.steps_per_generation}) or `per_device_train_batch_size` "
            f"({args.per_device_train_batch_size})."
        )


def check_end_of_stream(train_dataset, args: Any) -> None:
    """Refuse a stream that ended before an update was made (`InputError`): it does not tell its length before."""
    if isinstance(train_dataset, IterableDataset):
        raise InputError(
            f"No update was made: the data ended before the {args.generation_batch_size} samples of one generation "
            "(`generation_batch_size`) were there. Give more prompts, or lower `steps_per_generation` or "
            "`per_device_train_batch_size`."
        )


def is_prompt(value: Any) -> bool:
    """Return whether a value is text or chat messages, and not empty."""
    if isinstance(value, list):
        return bool(value) and all(map(_is_message, value))
    return isinstance(value, str) and value != ""


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    return isinstance(value.get("content"), str | list | dict) or bool(value.get("tool_calls"))  # a dict of a tool


def check_prompts(train_dataset, eval_dataset) -> None:
    """
    Refuse datasets with a value that is no prompt: neither text nor chat messages, or empty (`InputError`).

    A stream, and what a transform makes, is not known yet: these pass.
    """
    for name, dataset in named_datasets(train_dataset, eval_dataset):
        found = [(row, prompt) for row, prompt in enumerate(stored_prompts(dataset)) if not is_prompt(prompt)]
        if found:
            row, prompt = found[0]
            raise InputError(
                f"{len(found)} of the {len(dataset)} prompts of the {name} dataset cannot be used: that of row {row} "
                f"is {start_of(prompt)}. Give text, or a list of messages with `role` and `content`, or leave such "
                "rows out with `dataset.filter`."
            )


def named_datasets(train_dataset, eval_dataset) -> list[tuple[str, Any]]:
    """Return the datasets of a trainer with the names that messages call them; a split may be called `train` too."""
    eval_datasets = eval_dataset if isinstance(eval_dataset, dict) else {"eval": eval_dataset}
    return [("train", train_dataset), *eval_datasets.items()]


def stored_prompts(dataset) -> Iterator[Any]:
    """Yield the prompts of a dataset; none of a stream, of one whose transform may make others, or with images."""
    is_stored = isinstance(dataset, Dataset) and dataset.format["type"] != "custom"
    feature = dataset.features.get("prompt") if is_stored else None
    if feature is not None and not _has_media(feature):  # each image would be decoded
        prompts: Any = dataset.select_columns("prompt").with_format(None)
        for batch in prompts.iter(_ROWS_PER_READ):
            yield from batch["prompt"]


def _has_media(feature: Any) -> bool:
    if isinstance(feature, dict):
        return any(map(_has_media, feature.values()))
    if hasattr(feature, "feature"):
        return _has_media(feature.feature)
    return getattr(feature, "decode", False) and type(feature).__name__ != "Json"


def start_of(prompt: Any, length: int = 60) -> str:
    """Return the begin of a prompt, for a message."""
    text = repr(prompt)
    return text if len(text) <= length else f"{text[: length - 3]}..."
