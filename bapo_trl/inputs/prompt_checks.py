"""Checks of the datasets that a trainer is given, and of their prompts. What is no dataset at all is left to TRL."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset, IterableDataset
from torch import nn

from ..errors import InputError


_ROWS_PER_READ = 10_000
GIVEN_TO_REWARDS = frozenset(("prompts", "completions", "trainer_state", "log_extra", "log_metric"))
"""Names under which TRL gives reward functions values of its own, besides the columns of the dataset."""

_PROMPT_FIX = "Give text, or a list of messages with `role` and `content`"


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


def check_columns(columns: Iterable[str], reward_funcs: Sequence[Any]) -> None:
    """Refuse columns of a dataset that reward functions could not be given (`InputError`); models take none."""
    taken = sorted(GIVEN_TO_REWARDS.intersection(columns))
    if taken and any(not isinstance(each, (str, nn.Module)) for each in reward_funcs):
        raise InputError(
            f"The dataset has the column `{taken[0]}`, a name under which the trainer gives reward functions values "
            "of its own: rename it."
        )


def check_end_of_stream(train_dataset, args: Any) -> None:
    """Refuse a stream that ended before an update was made (`InputError`): it does not tell its length before."""
    if isinstance(train_dataset, IterableDataset):
        raise InputError(
            f"No update was made: the data ended before the {args.generation_batch_size} samples of one generation "
            "(`generation_batch_size`) were there. Give more prompts, or lower `steps_per_generation` or "
            "`per_device_train_batch_size`."
        )


def prompt_defect(prompt: Any) -> str | None:
    """Return what keeps a value from being a prompt, in words that follow "it"; `None` if nothing does."""
    if isinstance(prompt, str):
        if not prompt:
            return "is empty"
        try:
            prompt.encode()
        except UnicodeEncodeError:
            return "has a character that UTF-8 cannot encode"
        return None
    if not isinstance(prompt, list):
        return "is None" if prompt is None else f"is of type {type(prompt).__name__}"
    if not prompt:
        return "is empty"
    are_messages = all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in prompt)
    if not are_messages:
        return "is a list, but not of messages with a `role` and a `content`"
    kinds = str | list | dict  # the last in messages of tools
    bare = [each for each in prompt if not (isinstance(each.get("content"), kinds) or each.get("tool_calls"))]
    return f"has a message of role '{bare[0]['role']}' without text or a list as its `content`" if bare else None


def check_prompts(train_dataset, eval_dataset) -> None:
    """
    Refuse datasets with a value that is no prompt: neither text nor chat messages, or empty (`InputError`).

    A stream, and what a transform makes, is not known yet: these pass.
    """
    for name, dataset in named_datasets(train_dataset, eval_dataset):
        defects = ((row, prompt_defect(prompt)) for row, prompt in enumerate(stored_prompts(dataset)))
        found = [(row, defect) for row, defect in defects if defect is not None]
        if found:
            row, defect = found[0]
            count = f"{len(found)} of the {len(dataset)} prompts"
            raise InputError(
                f"{count} of the {name} dataset cannot be used: that of row {row} {defect}. {_PROMPT_FIX}, or leave "
                "such rows out with `dataset.filter`."
            )


def named_datasets(train_dataset, eval_dataset) -> list[tuple[str, Any]]:
    """Return the datasets of a trainer with the names that messages call them; a split may be called `train` too."""
    eval_datasets = eval_dataset if isinstance(eval_dataset, dict) else {"eval": eval_dataset}
    return [("train", train_dataset), *eval_datasets.items()]


def stored_prompts(dataset) -> Iterator[Any]:
    """
    Yield the prompts of a dataset; none of a stream, of a dataset whose transform may make others, or with images.

    Refuses a text that is not UTF-8 (`InputError`).
    """
    is_stored = isinstance(dataset, Dataset) and dataset.format["type"] != "custom"
    feature = dataset.features.get("prompt") if is_stored else None
    if feature is not None and not _has_media(feature):  # each image would be decoded
        prompts: Any = dataset.select_columns("prompt").with_format(None)
        try:
            for batch in prompts.iter(_ROWS_PER_READ):
                yield from batch["prompt"]
        except UnicodeDecodeError as error:
            raise InputError(
                f"A prompt of the dataset is not UTF-8 ({error}): convert the file it is from."
            ) from error


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
