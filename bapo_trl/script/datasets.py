"""Load the splits that `train_bapo.py` trains and evaluates on."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES as LOADERS  # "json", "csv", ...
from huggingface_hub.errors import HFValidationError

from ..errors import InputError
from ..tasks import CHAT_SUMS, GYM_PREFIX, MadeTask, load_chat_sums, load_gym_task, load_task
from .arguments import EMBEDDED


_FILE_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
_DATA_SUFFIXES = (*_FILE_BUILDERS, ".csv", ".tsv", ".txt", ".arrow")


@dataclass(frozen=True)
class Data:
    """
    What a run trains and evaluates on.

    Args:
        title (`str`): What the terminal calls it.
        train (`Dataset` or `IterableDataset`, *optional*): Prompts to train on, if the run does.
        test (`Dataset` or `IterableDataset`, *optional*): Prompts to evaluate on, if the run does.
        hub_id (`str`, *optional*): Id on the Hub, for the model card; `None` for data that is not one dataset of the
            Hub.
        test_title (`str`, *optional*): What the terminal calls the prompts to evaluate on, if not `title`.
    """

    title: str
    train: Dataset | IterableDataset | None
    test: Dataset | IterableDataset | None
    hub_id: str | None = None
    test_title: str | None = None


def common_hub_id(sources: Iterable[str]) -> str | None:
    """
    Return the id of the one dataset on the Hub that all sources are, or `None` if they are not.

    Files, folders, buckets and the loaders of `datasets` (`json`, ...) are no such dataset. To be asked when the data
    is loaded: a run may write a folder of the same name.

    Args:
        sources (iterable of `str`): Names as [`load_splits`] and [`~datasets.load_dataset`] take them.
    """
    ids = {_hub_id(source) for source in sources}
    return ids.pop() if len(ids) == 1 else None


def _hub_id(source: str) -> str | None:
    repo_id = source.removeprefix("hf://datasets/")
    is_elsewhere = _is_path(source) or source in LOADERS or repo_id.count("/") > 1
    return None if is_elsewhere else repo_id


def _is_path(name: str) -> bool:
    path = Path(name)
    return path.exists() or path.is_absolute() or name.startswith(".") or path.suffix in _DATA_SUFFIXES


def load_splits(
    name: str, config: str | None = None, streaming: bool = False, parameter: str = "dataset_name"
) -> DatasetDict | IterableDatasetDict:
    """
    Load a dataset from a file, a folder or the Hub.

    Args:
        name (`str`): A `.json`, `.jsonl` or `.parquet` file (its rows are the split `"train"`), a folder written by
            `save_to_disk`, a folder of data files, or an id on the Hub.
        config (`str`, *optional*): Configuration name, for Hub ids and folders of data files.
        streaming (`bool`, *optional*, defaults to `False`): Whether to stream files and Hub datasets.
        parameter (`str`, *optional*, defaults to `"dataset_name"`): Parameter that holds `name`, for the error
            messages.

    Returns:
        Splits by name.

    Raises:
        ValueError: If there is no such file or folder, the file cannot be read, or the Hub does not give the dataset.
    """
    path = Path(name)
    if path.is_file():
        if path.suffix not in _FILE_BUILDERS:
            raise InputError(
                f"`{parameter}` is the file '{name}': expected one of {', '.join(_FILE_BUILDERS)}, or a folder."
            )
        return _load_file(name, streaming, parameter)
    if path.is_dir() and ((path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists()):
        loaded = load_from_disk(name)
        return DatasetDict(train=loaded) if isinstance(loaded, Dataset) else loaded
    if _is_path(name) and not path.is_dir():
        raise InputError(
            f"`{parameter}` is '{name}', but there is no such file or folder: correct the path, or give an id on the "
            "Hub such as 'org/dataset'."
        )
    try:
        return load_dataset(name, name=config, streaming=streaming)
    except (OSError, DatasetsError, HFValidationError, ValueError) as error:
        if path.is_dir():
            for file in sorted(each for each in path.rglob("*") if each.suffix in _FILE_BUILDERS):
                _load_file(str(file), streaming, parameter)  # says which one it is
            raise InputError(
                f"`{parameter}` is the folder '{name}', whose files cannot be read together: give files of one kind "
                f"and with the same columns. What failed: {_reason(error)}"
            ) from error
        raise InputError(
            f"`{parameter}` is '{name}', which is neither a file nor a folder here, and the Hub did not give it "
            f"either: {error}"
        ) from error


def _load_file(name: str, streaming: bool, parameter: str) -> DatasetDict | IterableDatasetDict:
    builder = _FILE_BUILDERS[Path(name).suffix]
    try:
        if builder == "json":
            _check_encoding(name)
        splits = load_dataset(builder, data_files={"train": name}, streaming=streaming)
        next(iter(splits["train"]), None)  # a stream is not read before
        return splits
    except (DatasetsError, StopIteration, ValueError) as error:  # pyarrow's is a `ValueError`
        shape = "one JSON object a row, in UTF-8" if builder == "json" else "a whole parquet file"
        reason = _reason(error) or "it holds no row"
        raise InputError(
            f"`{parameter}` is the file '{name}', which cannot be read ({reason}): give {shape}, with at least a row."
        ) from error


def _reason(error: BaseException) -> str:
    """Return the first line of what was raised first."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).partition("\n")[0]


def _check_encoding(name: str) -> None:
    """Refuse a file that is not UTF-8, with the line where it is not: datasets may read it as if it were."""
    with open(name, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                # Without its cause: this is the reason that a user is told
                raise InputError(f"line {number} is not UTF-8: {error.reason} {line[error.start]:#04x}") from None


def hold_out(dataset: Dataset | IterableDataset, fraction: float) -> tuple[Dataset, Dataset]:
    """
    Return the dataset without a share of its rows, and these: always the same ones.

    Args:
        dataset (`Dataset`): Rows to divide.
        fraction (`float`): Share to hold out, in (0, 1).

    Raises:
        ValueError: If `fraction` is out of its range or one part has no row, or for a stream.
    """
    if isinstance(dataset, IterableDataset):
        raise InputError(
            "`eval_fraction` cannot hold out a share of a stream: set `eval_dataset`, or `dataset_streaming` to false."
        )
    count = round(fraction * len(dataset)) if math.isfinite(fraction) else 0
    if not (0 < fraction < 1 and 0 < count < len(dataset)):
        raise InputError(
            f"`eval_fraction` is {fraction}, which leaves {count} of {len(dataset)} prompts to evaluate on: set it to "
            "a share in (0, 1) that leaves prompts for both."
        )
    parts = dataset.train_test_split(test_size=count, seed=0)
    return parts["train"], parts["test"]


def first_rows(dataset: Dataset | IterableDataset, count: int) -> Dataset | IterableDataset:
    """Return the first rows of a dataset: `count`, or all where there are fewer."""
    return dataset.take(count if isinstance(dataset, IterableDataset) else min(count, len(dataset)))


def make_task(name: str | None, task_args: str | dict[str, Any] | None = None) -> MadeTask | None:
    """
    Make the task of a name such as `"chat_sums"` or `"reasoning_gym:chain_sum"`; `None` for a dataset to be loaded.

    Args:
        name (`str`, *optional*): Value of `--dataset_name`.
        task_args (`str` or `dict`, *optional*): Arguments of the task, as JSON or as a mapping.

    Raises:
        ValueError: If the task does not take the arguments, or is none that takes any.
    """
    if name is not None and name.startswith(GYM_PREFIX):
        return load_gym_task(name, task_args)
    if task_args is not None:
        raise InputError(
            f"`task_args` is {task_args!r}, but `dataset_name` is '{name}', which takes none: leave `task_args` out, "
            f"or give a task such as '{GYM_PREFIX}chain_sum'."
        )
    if name == EMBEDDED:
        return replace(load_task(), name="the embedded task (sums of two numbers)")
    return load_chat_sums() if name == CHAT_SUMS else None


def pick_split(splits: DatasetDict | IterableDatasetDict, split: str, parameter: str) -> Dataset | IterableDataset:
    """
    Return one split.

    Args:
        splits (`DatasetDict` or `IterableDatasetDict`): Splits by name.
        split (`str`): Name of the split.
        parameter (`str`): Parameter that holds `split`, for the error message.

    Raises:
        ValueError: If there is no such split, naming those there are.
    """
    if split not in splits:
        raise InputError(
            f"`{parameter}` is '{split}', but the dataset has only the splits {sorted(splits)}: set `{parameter}` to "
            "one of them."
        )
    return splits[split]


def pick_eval_split(splits: DatasetDict | IterableDatasetDict, split: str) -> Dataset | IterableDataset:
    """Return the only split, or the one that `dataset_test_split` names; errors as in [`pick_split`]."""
    only = next(iter(splits)) if len(splits) == 1 else split
    return pick_split(splits, only, "dataset_test_split")
