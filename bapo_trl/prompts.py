"""Checks of the datasets that a trainer is given. What is no dataset at all is left to TRL."""

from datasets import Dataset, IterableDataset

from .bapo_config import BAPOConfig


def check_columns(train_dataset, eval_dataset) -> None:
    """
    Refuse datasets without a `prompt` column. A stream that does not know its columns passes.

    Args:
        train_dataset, eval_dataset (`Dataset`, `IterableDataset` or, for evaluation, a mapping of names to these):
            Arguments of the trainer.

    Raises:
        ValueError: If one has columns, but no `prompt`.
    """
    eval_datasets = eval_dataset if isinstance(eval_dataset, dict) else {"eval": eval_dataset}
    for name, dataset in {"train": train_dataset, **eval_datasets}.items():
        columns = dataset.column_names if isinstance(dataset, (Dataset, IterableDataset)) else None
        if columns is not None and "prompt" not in columns:
            raise ValueError(
                f"The {name} dataset has no `prompt` column, only {columns}: rename the column with the prompts, "
                "e.g. `dataset.rename_column('question', 'prompt')`."
            )


def check_number_of_prompts(train_dataset, args: BAPOConfig) -> None:
    """
    Refuse a dataset that does not fill one generation: TRL leaves out an incomplete one, and would train nothing.

    Args:
        train_dataset (`Dataset` or `IterableDataset`):
            Prompts to train on. Of a stream the number is not known: it passes.
        args ([`BAPOConfig`]):
            Settings of the run, in a process that knows the number of processes.

    Raises:
        ValueError: If it has fewer prompts than one generation takes, over all processes.
    """
    needed = args.generation_batch_size // args.num_generations
    if isinstance(train_dataset, Dataset) and len(train_dataset) < needed:
        raise ValueError(
            f"The train dataset has {len(train_dataset)} prompts, but one generation takes {needed} "
            f"(`generation_batch_size` {args.generation_batch_size} / `num_generations` {args.num_generations}, over "
            f"all processes): nothing would be trained. Give at least {needed} prompts, or lower "
            f"`steps_per_generation` ({args.steps_per_generation}) or `per_device_train_batch_size` "
            f"({args.per_device_train_batch_size})."
        )
