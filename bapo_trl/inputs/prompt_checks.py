"""Checks of the trainer's datasets and their prompts. TRL reports values that are not datasets."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset, IterableDataset

from ..errors import InputError


_ROWS_PER_READ = 10_000
GIVEN_TO_REWARDS = frozenset(("prompts", "completions", "trainer_state", "log_extra", "log_metric"))
"""Names of the arguments that TRL passes to reward functions in addition to the dataset's columns."""


@dataclass(frozen=True)
class TokenLimits:
    """Limits of a model in tokens; `None` for limits that its configuration does not give."""

    window: int | None  # for a prompt with its completion
    completion: int  # `max_completion_length`
    vocabulary: int | None

    @property
    def longest_prompt(self) -> int | None:
        """Largest number of tokens of a prompt; `None` for no limit."""
        return None if self.window is None else self.window - self.completion

    @property
    def why_too_long(self) -> str:
        """End of an error message that begins with the number of the prompt's tokens: the limit and the fix."""
        return (
            f"but the model's window of {self.window} (`max_position_embeddings`) leaves {self.longest_prompt} before "
            f"a completion of `max_completion_length` {self.completion}. Prompts are not truncated: remove long ones "
            "with `dataset.filter`, lower `max_completion_length`, or use a model with a larger window."
        )


def check_number_of_prompts(train_dataset, args: Any) -> None:
    """
    Raise an `InputError` if a dataset has too few prompts for one generation over all processes.

    TRL drops incomplete generations, so the run would train nothing. Streams pass, as their length is not known.
    """
    needed = args.generation_batch_size // args.num_generations
    if isinstance(train_dataset, Dataset) and len(train_dataset) < needed:
        raise InputError(
            f"The train dataset has {len(train_dataset)} prompts, but one generation takes {needed} "
            f"(`generation_batch_size` {args.generation_batch_size} / `num_generations` {args.num_generations}, over "
            f"all processes): nothing would be trained. Provide at least {needed} prompts, or lower "
            f"`steps_per_generation` ({args.steps_per_generation}) or `per_device_train_batch_size` "
            f"({args.per_device_train_batch_size})."
        )


def check_end_of_stream(train_dataset, args: Any) -> None:
    """Raise an `InputError` if a stream, whose length is not known in advance, ended before the first update."""
    if isinstance(train_dataset, IterableDataset):
        raise InputError(
            "No update was made: the dataset ended before it filled one generation of "
            f"{args.generation_batch_size} samples (`generation_batch_size`). Provide more prompts, or lower "
            "`steps_per_generation` or `per_device_train_batch_size`."
        )


def is_prompt(value: Any) -> bool:
    """Return whether a value is a non-empty text or list of chat messages."""
    if isinstance(value, list):
        return bool(value) and all(map(_is_message, value))
    return isinstance(value, str) and value != ""


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    return isinstance(value.get("content"), str | list | dict) or bool(value.get("tool_calls"))  # tools give a dict


def check_prompts(train_dataset, eval_dataset) -> None:
    """
    Raise an `InputError` if a dataset has a prompt that is empty, or neither text nor chat messages.

    Streams and datasets with a transform pass, as their prompts are not known yet.
    """
    for name, dataset in named_datasets(train_dataset, eval_dataset):
        found = [(row, prompt) for row, prompt in enumerate(stored_prompts(dataset)) if not is_prompt(prompt)]
        if found:
            row, prompt = found[0]
            raise InputError(
                f"{len(found)} of the {len(dataset)} prompts of the {name} dataset cannot be used: the prompt of row "
                f"{row} is {start_of(prompt)}. Use text, or a list of messages with `role` and `content`, or remove "
                "these rows with `dataset.filter`."
            )


def has_image(row: Mapping[str, Any]) -> bool:
    """Return whether an example of the dataset has an image, in a column of its own or in a message of its prompt."""
    messages = row.get("prompt")
    contents = [message.get("content") for message in messages] if isinstance(messages, list) else []
    parts = [part for content in contents if isinstance(content, list) for part in content]
    is_in_prompt = any(part.get("type") == "image" for part in parts)
    return is_in_prompt or bool(row.get("images")) or row.get("image") is not None


def check_images(inputs: Sequence[Mapping[str, Any]]) -> None:
    """
    Raise an `InputError` if only some examples of a batch have an image.

    For the others, TRL up to 1.16 at least passes `None` to the image processor, which raises a `TypeError`.
    """
    with_image, without = (next((row for row in inputs if has_image(row) is it), None) for it in (True, False))
    if with_image is not None and without is not None:
        one, other = (start_of(row["prompt"], 200) for row in (with_image, without))  # an image takes 80 characters
        raise InputError(
            f"Only some prompts of a generation step have an image: {one} has one, and {other} has none. TRL cannot "
            "process them together: give each row of the dataset an image, such as a blank one, or train the rows "
            "without images in another run."
        )


def named_datasets(train_dataset, eval_dataset) -> list[tuple[str, Any]]:
    """Return the trainer's datasets with their names in messages; an evaluation split may be named `train` too."""
    eval_datasets = eval_dataset if isinstance(eval_dataset, dict) else {"eval": eval_dataset}
    return [("train", train_dataset), *eval_datasets.items()]


def stored_prompts(dataset) -> Iterator[Any]:
    """Yield the prompts of a dataset; none of a stream, a dataset with a transform, or a dataset with images."""
    is_stored = isinstance(dataset, Dataset) and dataset.format["type"] != "custom"
    feature = dataset.features.get("prompt") if is_stored else None
    if feature is not None and not _has_media(feature):  # reading would decode each image
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
    """Return the beginning of a prompt, for a message."""
    text = repr(prompt)
    return text if len(text) <= length else f"{text[: length - 3]}..."
