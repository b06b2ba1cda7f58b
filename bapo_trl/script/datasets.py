"""The data that the flags ask for: to train on, to evaluate on, in the columns that both read."""

import glob
import json
import math
import os
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datasets import (
    Dataset,
    DatasetDict,
    IterableDataset,
    IterableDatasetDict,
    disable_caching,
    load_dataset,
    load_from_disk,
)
from datasets.exceptions import DatasetsError
from huggingface_hub.errors import HFValidationError
from trl import DatasetMixtureConfig, get_dataset

from ..bapo_config import BAPOConfig
from ..errors import InputError
from ..tasks import CHAT_SUMS, GYM_PREFIX, MadeTask, load_chat_sums, load_gym_task, load_task
from .arguments import EMBEDDED, BAPOScriptArguments


_FILE_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
_DATA_SUFFIXES = (*_FILE_BUILDERS, ".csv", ".tsv", ".txt", ".arrow")
_LOADING = (OSError, DatasetsError, HFValidationError, ValueError)  # pyarrow's errors are of the last


@dataclass(frozen=True)
class Data:
    """What a run trains and evaluates on."""

    title: str  # on the terminal
    train: Dataset | IterableDataset | None  # if the run trains
    test: Dataset | IterableDataset | None  # if it evaluates
    test_title: str | None = None  # if not `title`


def has_data(script_args: BAPOScriptArguments, dataset_args: DatasetMixtureConfig) -> bool:
    """Tell whether any data is asked for."""
    return bool(script_args.dataset_name or script_args.eval_dataset or dataset_args.datasets)


def check_data_named(
    script_args: BAPOScriptArguments, training_args: BAPOConfig, dataset_args: DatasetMixtureConfig
) -> None:
    """Refuse a run that names no data, and paths to data where nothing is (`InputError`)."""
    if not (
        script_args.dataset_name
        or dataset_args.datasets
        or (has_data(script_args, dataset_args) and not training_args.do_train)
    ):
        raise InputError(
            "`dataset_name` is not set: give a json, jsonl or parquet file, a dataset folder, an id on the Hub, or "
            f"'{EMBEDDED}' for the built-in task (or list `datasets` in the config file)."
        )
    for parameter in ("dataset_name", "eval_dataset"):
        _check_exists(getattr(script_args, parameter), parameter)


def load_data(
    script_args: BAPOScriptArguments,
    training_args: BAPOConfig,
    dataset_args: DatasetMixtureConfig,
    task: MadeTask | None = None,
) -> Data:
    """Load what the run trains on and what it evaluates on: of a task of the package, a mixture, or a dataset."""
    data = _load(script_args, training_args, dataset_args, task)
    if data.test is None or script_args.max_eval_samples is None:
        return data
    return replace(data, test=first_rows(data.test, script_args.max_eval_samples))


def _load(
    script_args: BAPOScriptArguments,
    training_args: BAPOConfig,
    dataset_args: DatasetMixtureConfig,
    task: MadeTask | None,
) -> Data:
    if script_args.eval_dataset is not None and script_args.eval_fraction is not None:
        raise InputError("`eval_dataset` and `eval_fraction` are both set: leave one of them out.")
    train: Any = None
    splits: Any = None
    if script_args.eval_dataset is not None and not training_args.do_train:
        title = script_args.eval_dataset
    elif task is not None:
        title = task.name
        train, splits = task.train_dataset, {script_args.dataset_test_split: task.test_dataset}
    elif dataset_args.datasets:
        title, splits = "a dataset mixture", load_mixture(dataset_args)
    else:
        title = str(script_args.dataset_name)
        splits = load_splits(title, script_args.dataset_config, script_args.dataset_streaming)
    if train is None and (training_args.do_train or script_args.eval_fraction is not None):
        train = pick_split(splits, script_args.dataset_train_split, "dataset_train_split")
    if script_args.eval_fraction is not None:
        train, test = hold_out(train, script_args.eval_fraction)
        test_title = f"{script_args.eval_fraction:g} of {title}"
        return Data(title, train if training_args.do_train else None, test, test_title)
    if script_args.eval_dataset is not None:
        is_only = script_args.dataset_name in (None, script_args.eval_dataset)
        config = script_args.dataset_config if is_only else None  # else that of `dataset_name`
        splits = load_splits(script_args.eval_dataset, config, parameter="eval_dataset")
        test = pick_eval_split(splits, script_args.dataset_test_split)
        return Data(title, train, test, script_args.eval_dataset)
    if not training_args.do_eval:
        return Data(title, train, None)
    if training_args.do_train:  # the only split is trained on
        return Data(title, train, pick_split(splits, script_args.dataset_test_split, "dataset_test_split"))
    return Data(title, None, pick_eval_split(splits, script_args.dataset_test_split))


def load_mixture(settings: DatasetMixtureConfig) -> DatasetDict:
    """Load a mixture as TRL does, but with a test split that is the same on all processes and in all runs."""
    if settings.streaming and settings.test_split_size is not None:
        raise InputError(
            f"`test_split_size` {settings.test_split_size} cannot be split off a stream: set `eval_dataset`, or "
            "`streaming` to false."
        )
    try:
        mixture = get_dataset(replace(settings, test_split_size=None))
    except _LOADING as error:
        named = ", ".join(f"'{part.path}'" for part in settings.datasets)
        files = [part.data_files for part in settings.datasets if isinstance(part.data_files, str)]
        raise InputError(f"`datasets` ({named}) could not be loaded: {_reason(error, files)}") from error
    if settings.test_split_size is None:
        return mixture
    return mixture["train"].train_test_split(test_size=settings.test_split_size, seed=0)


def load_splits(
    name: str, config: str | None = None, streaming: bool = False, parameter: str = "dataset_name"
) -> DatasetDict | IterableDatasetDict:
    """
    Load a dataset, its splits by name, of which the rows of a file are `"train"`.

    Its name is a `.json`, `.jsonl` or `.parquet` file, a folder written by `save_to_disk`, or, with an optional
    `config`, a folder of data files or an id on the Hub. Error messages call it `parameter`.
    """
    _check_exists(name, parameter)
    path = Path(name)
    if path.is_dir() and ((path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists()):
        disable_caching()  # else what is made of its rows is written beside them, where it may not
        loaded = load_from_disk(name)
        return DatasetDict(train=loaded) if isinstance(loaded, Dataset) else loaded
    try:
        if path.is_file():
            if path.suffix not in _FILE_BUILDERS:
                raise InputError(
                    f"`{parameter}` is the file '{name}': expected one of {', '.join(_FILE_BUILDERS)}, or a folder."
                )
            if path.suffix != ".parquet":
                with open(name, encoding="utf-8") as file:  # else other bytes come up where a row is read
                    deque(file, maxlen=0)
            whole = glob.escape(os.path.abspath(name))  # else a `[1]` in a name stands for another file
            splits = load_dataset(_FILE_BUILDERS[path.suffix], data_files={"train": whole}, streaming=streaming)
            next(iter(splits["train"]))  # a stream is not read before
            return splits
        return load_dataset(name, name=config, streaming=streaming)
    except InputError:
        raise
    except (*_LOADING, StopIteration) as error:
        if "Config name is missing" in str(error):  # which datasets says with those that there are
            known = str(error).partition("configs: ")[2].partition("\n")[0]
            alone = f"evaluate on it alone, with --dataset_name {name} --dataset_config NAME"
            fix = "name one with --dataset_config" if parameter == "dataset_name" else alone
            raise InputError(f"`{parameter}` is '{name}', which has the configurations {known}: {fix}.") from error
        files = [name] if path.is_file() else [str(each) for each in sorted(path.rglob("*"))]
        what = "cannot be loaded" if path.exists() else "is neither a file nor a folder here, nor given by the Hub"
        raise InputError(f"`{parameter}` is '{name}', which {what}: {_reason(error, files)}") from error


def _check_exists(name: str | None, parameter: str) -> None:
    """Refuse a path where there is neither a file nor a folder."""
    path = Path(name or "")
    looks_like_path = path.is_absolute() or str(name).startswith(".") or path.suffix in _DATA_SUFFIXES
    if (path.exists() or looks_like_path) and not (path.is_file() or path.is_dir()):
        raise InputError(
            f"`{parameter}` is '{name}', but there is no such file or folder: correct the path, or give an id on the "
            "Hub such as 'org/dataset'."
        )


def _reason(error: BaseException, files: list[str]) -> str:
    """Return what is wrong in the first of the files of JSON that is damaged, else the first line of the cause."""
    for file in files:
        if Path(file).suffix in (".json", ".jsonl") and os.path.isfile(file) and (defect := json_defect(file)):
            return f"'{file}' has a {defect}"
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).partition("\n")[0] or "it holds no row"


def json_defect(name: str) -> str | None:
    """
    Return what is wrong with a file of JSON, an object a line or an array of them, and in which line, counted from 1.

    `None` if nothing is. The libraries count rows of a block, without the empty lines.
    """
    number = None  # of the line, where each has an object of its own
    with open(name, "rb") as file:
        try:
            if file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
                file.seek(0)
                json.load(file)
                return None
            file.seek(0)
            for number, line in enumerate(file, start=1):
                text = line.decode("utf-8-sig").strip()
                if text and not isinstance(json.loads(text), dict):
                    return f"JSON parse error in line {number}: it is no object"
        except json.JSONDecodeError as error:
            return f"JSON parse error in line {number or error.lineno}: {error.msg} at column {error.colno}"
        except UnicodeDecodeError as error:
            return f"byte in line {number} that is not UTF-8: {error.reason} {error.object[error.start]:#04x}"
    return None


def hold_out(dataset: Dataset | IterableDataset, fraction: float) -> tuple[Dataset, Dataset]:
    """
    Return the dataset without a share of its rows, and these: always the same ones.

    Refuses a share out of (0, 1) or that leaves one part without a row, and a stream (`InputError`).
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

    Refuses arguments (JSON or a mapping) that it does not take (`InputError`).
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
    """Return one split; refuse, by the parameter that names it, one that is not there (`InputError`)."""
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
