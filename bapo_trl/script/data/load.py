"""Load the datasets that the flags name."""

import glob
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from datasets import (
    Dataset,
    DatasetDict,
    IterableDataset,
    IterableDatasetDict,
    disable_caching,
    load_dataset,
    load_dataset_builder,
    load_from_disk,
)
from datasets.exceptions import DatasetsError
from datasets.load import infer_module_for_data_files_list
from datasets.packaged_modules.csv.csv import CsvConfig
from datasets.packaged_modules.json.json import JsonConfig
from trl import DatasetMixtureConfig, get_dataset
from trl.scripts.utils import DatasetConfig

from ...errors import InputError
from ...tasks import CHAT_SUMS, GYM_PREFIX, MadeTask, load_chat_sums, load_gym_task, load_task
from ..settings.arguments import EMBEDDED
from ..settings.parser import Settings
from .text_files import load_as_written


Rows: TypeAlias = Dataset | IterableDataset

_LOADING = (OSError, DatasetsError, ValueError)  # pyarrow's errors are ValueErrors


@dataclass(frozen=True)
class Data:
    """Datasets of a run for training and evaluation."""

    title: str  # shown on the console
    train: Rows | None  # `None` if the run does not train
    test: Rows | None  # `None` if the run does not evaluate
    test_title: str | None = None  # if it differs from `title`

    @property
    def prompts(self) -> Rows | None:
        """Training dataset or, if the run does not train, evaluation dataset."""
        return self.test if self.train is None else self.train


def load_data(settings: Settings, task: MadeTask | None = None) -> Data:
    """Load the training and evaluation data from a built-in task, a dataset mixture, or a dataset."""
    script_args, training_args, _, dataset_args = settings
    eval_dataset, fraction, trains = script_args.eval_dataset, script_args.eval_fraction, training_args.do_train
    if eval_dataset is not None and fraction is not None:
        raise InputError("`eval_dataset` and `eval_fraction` are both set: remove one of them.")
    title, train, test, test_title = str(eval_dataset), None, None, eval_dataset
    train_split, test_split = script_args.dataset_train_split, script_args.dataset_test_split
    if trains or eval_dataset is None:
        splits: Any
        if task is not None:
            title, splits = task.name, {test_split: task.test_dataset, train_split: task.train_dataset}
        elif dataset_args.datasets:
            title, splits = "a dataset mixture", load_mixture(dataset_args)
        else:
            title = str(script_args.dataset_name)
            splits = load_splits(title, script_args.dataset_config, script_args.dataset_streaming)
        if trains or fraction is not None:
            train = pick_split(splits, train_split, "dataset_train_split")
        if fraction is not None:
            train, test = hold_out(train, fraction)
            test_title = f"{fraction:g} of {title}"
        elif trains and training_args.do_eval and eval_dataset is None:  # even a single split is for training
            test = pick_split(splits, test_split, "dataset_test_split")
        elif not trains:
            test = _pick_eval_split(splits, test_split)
    if eval_dataset is not None:
        is_only = script_args.dataset_name in (None, eval_dataset)
        config = script_args.dataset_config if is_only else None  # otherwise it belongs to `dataset_name`
        test = _pick_eval_split(load_splits(eval_dataset, config, parameter="eval_dataset"), test_split)
    if test is not None and script_args.max_eval_samples is not None:
        count = script_args.max_eval_samples
        test = test.take(count if isinstance(test, IterableDataset) else min(count, len(test)))
    return Data(title, train if trains else None, test, test_title)


def load_mixture(settings: DatasetMixtureConfig) -> DatasetDict:
    """Load a dataset mixture as TRL does, but with the same test split on all processes and in all runs."""
    try:
        parts = [replace(part, **_as_arrow_files(part)) for part in settings.datasets]
        mixture = get_dataset(replace(settings, datasets=parts, test_split_size=None))
    except _LOADING as error:
        named = ", ".join(f"'{part.path}'" for part in settings.datasets)
        raise InputError(f"`datasets` ({named}) could not be loaded: {_reason(error)}") from error
    if settings.test_split_size is None:
        return mixture
    return mixture["train"].train_test_split(test_size=settings.test_split_size, seed=0)


def _as_arrow_files(part: DatasetConfig) -> dict[str, Any]:
    """Return the fields that replace JSON or CSV files in a mixture by Arrow files with the values as written."""
    found = _find_text_files(part.path, name=part.name, data_dir=part.data_dir, data_files=part.data_files)
    if found is None:
        return {}
    splits = load_as_written(*found)
    files = {split: [file["filename"] for file in rows.cache_files] for split, rows in splits.items()}
    return {"path": "arrow", "name": None, "data_dir": None, "data_files": files}


def load_splits(
    name: str, config: str | None = None, streaming: bool = False, parameter: str = "dataset_name"
) -> DatasetDict | IterableDatasetDict:
    """
    Load the splits of a data file (as `"train"`), a folder written by `save_to_disk`, or, with an optional `config`,
    a folder of data files or a Hub id. Error messages name the setting `parameter`.

    The values of JSON and CSV files are as written ([`~text_files.load_as_written`]).
    """
    path = Path(name)
    if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        disable_caching()  # otherwise `map` writes into the dataset's folder, which may be read-only
        loaded = load_from_disk(name)
        return DatasetDict(train=loaded) if isinstance(loaded, Dataset) else loaded
    source: str | None = name
    settings: dict[str, Any] = {"name": config}
    try:
        if path.is_file():
            source, settings = infer_module_for_data_files_list([os.path.abspath(name)])
            if source is None:
                raise ValueError("its suffix is not one that `datasets` reads, such as .jsonl, .csv or .parquet")
            # Escaped, as otherwise `[1]` in a name is a pattern
            settings = {**settings, "data_files": {"train": glob.escape(os.path.abspath(name))}}
        found = _find_text_files(source, **settings)
        if found is not None:
            return load_as_written(*found, streaming=streaming)
        splits = load_dataset(source, streaming=streaming, **settings)
        if path.is_file():
            next(iter(splits["train"]))  # a stream is not read earlier
        return splits
    except (*_LOADING, StopIteration) as error:
        what = "cannot be loaded" if path.exists() else "is no file or folder here, and cannot be loaded from the Hub"
        raise InputError(f"`{parameter}` is '{name}', which {what}: {_reason(error)}") from error


def _find_text_files(source: str, **settings: Any) -> tuple[dict[str, list[str]], str | None] | None:
    """Return the JSON or CSV files of each split, and the separator of the latter, if all of them are here."""
    if source not in ("csv", "json") and not os.path.isdir(source):
        return None
    config = load_dataset_builder(source, **settings).config
    if not isinstance(config, CsvConfig) and not (isinstance(config, JsonConfig) and config.field is None):
        return None
    files = {str(split): list(map(str, paths)) for split, paths in config.data_files.items()}
    are_here = all(os.path.isfile(path) and not path.endswith(".zip") for paths in files.values() for path in paths)
    return (files, getattr(config, "sep", None)) if are_here else None


def _reason(error: BaseException) -> str:
    while error.__cause__ is not None and isinstance(error, DatasetsError):
        error = error.__cause__
    return " ".join(str(error).split()) or "it has no rows"


def hold_out(dataset: Any, fraction: float) -> tuple[Dataset, Dataset]:
    """Split off a fraction of the rows, the same rows in all runs; return the other rows, and these rows."""
    try:
        parts = dataset.train_test_split(test_size=fraction, seed=0)
    except (AttributeError, ValueError) as error:  # a stream has no such method
        raise InputError(f"`eval_fraction` is {fraction}, but the data cannot be split: {error}") from error
    return parts["train"], parts["test"]


def make_task(name: str | None, task_args: str | dict[str, Any] | None = None) -> MadeTask | None:
    """
    Return the built-in task of a name such as `"chat_sums"` or `"reasoning_gym:chain_sum"`; `None` for other names.

    Raises an `InputError` if the task does not accept its arguments (JSON or a mapping).
    """
    if name is not None and name.startswith(GYM_PREFIX):
        return load_gym_task(name, task_args)
    if task_args is not None:
        raise InputError(
            f"`task_args` is {task_args!r}, but `dataset_name` is '{name}', which takes no arguments: remove "
            f"`task_args`, or set `dataset_name` to a task such as '{GYM_PREFIX}chain_sum'."
        )
    if name == EMBEDDED:
        return replace(load_task(), name="the embedded task (sums of two numbers)")
    return load_chat_sums() if name == CHAT_SUMS else None


def pick_split(splits: Any, split: str, parameter: str) -> Any:
    """Return a split; raise an `InputError` with the name of the setting, `parameter`, if it does not exist."""
    if split not in splits:
        raise InputError(
            f"`{parameter}` is '{split}', but the dataset has only the splits {sorted(splits)}: set `{parameter}` to "
            "one of them."
        )
    return splits[split]


def _pick_eval_split(splits: Any, split: str) -> Any:
    """Return the only split or, if there are several, the split that `dataset_test_split` names."""
    return pick_split(splits, next(iter(splits)) if len(splits) == 1 else split, "dataset_test_split")
