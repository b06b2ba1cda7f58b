"""Checks of the trainer's datasets and of a generation's prompts. TRL reports values that are not datasets."""

from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset, IterableDataset

from ..errors import InputError


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


def start_of(prompt: Any, length: int = 60) -> str:
    """Return the beginning of a prompt, for a message."""
    text = repr(prompt)
    return text if len(text) <= length else f"{text[: length - 3]}..."
