"""Checks of the trainer's datasets. TRL reports values that are not datasets."""

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


def start_of(prompt: Any, length: int = 60) -> str:
    """Return the beginning of a prompt, for a message."""
    text = repr(prompt)
    return text if len(text) <= length else f"{text[: length - 3]}..."
