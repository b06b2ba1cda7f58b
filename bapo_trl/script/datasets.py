"""The data that the flags ask for: to train on, to evaluate on, in the columns that both read."""

import glob
import gzip
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError
from huggingface_hub.errors import HFValidationError
from trl import DatasetMixtureConfig, get_dataset

from ..bapo_config import BAPOConfig
from ..errors import InputError
from ..tasks import CHAT_SUMS, GYM_PREFIX, MadeTask, load_chat_sums, load_gym_task, load_task
from .arguments import EMBEDDED, BAPOScriptArguments
from .prompts import PromptFormat, format_prompts
from .saved_data import apart_from_saved


_FILE_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
_DATA_SUFFIXES = (*_FILE_BUILDERS, ".csv", ".tsv", ".txt", ".arrow")


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
    check_data_named(script_args, training_args, dataset_args)
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


def format_data(data: Data, script_args: BAPOScriptArguments, load_tokenizer: Callable[[], Any]) -> Data:
    """Give all prompts the columns that trainer and rewards read. The tokenizer is loaded only if chats are formed."""
    form = PromptFormat(
        script_args.prompt_column, script_args.answer_column, script_args.prompt_template, script_args.system_prompt
    )
    if form.forms_prompts:
        form = form.with_chats_if(bool(getattr(load_tokenizer(), "chat_template", None)))
    parts = {"train": data.train, "test": data.test}
    names = {"train": f"train dataset ({data.title})", "test": f"eval dataset ({data.test_title or data.title})"}
    formatted: dict[str, Any] = {
        part: format_prompts(dataset, form, names[part]) for part, dataset in parts.items() if dataset is not None
    }
    return replace(data, **formatted)


def load_mixture(settings: DatasetMixtureConfig) -> DatasetDict:
    """Load a mixture as TRL does, but with a test split that is the same on all processes and in all runs."""
    if settings.streaming and settings.test_split_size is not None:
        raise InputError(
            f"`test_split_size` {settings.test_split_size} cannot be split off a stream: set `eval_dataset`, or "
            "`streaming` to false."
        )
    for part in settings.datasets:
        _check_no_pattern(part.path, "datasets")
    try:
        mixture = get_dataset(replace(settings, test_split_size=None))
    except (OSError, DatasetsError, HFValidationError, ValueError) as error:
        named = ", ".join(f"'{part.path}'" for part in settings.datasets)
        files = [file for part in settings.datasets for file in _json_files(part.data_files)]
        defects = (f"'{file}' has a {defect}" for file in files if (defect := json_defect(file)))
        raise InputError(f"`datasets` ({named}) could not be loaded: {next(defects, _reason(error))}") from error
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
    _check_exists(name, parameter)
    _check_no_pattern(name, parameter)
    try:
        return load_dataset(name, name=config, streaming=streaming)
    except (OSError, DatasetsError, HFValidationError, ValueError) as error:
        if "Config name is missing" in str(error):  # which datasets says with those that there are
            known = str(error).partition("configs: ")[2].partition("\n")[0]
            alone = f"evaluate on it alone, with --dataset_name {name} --dataset_config NAME"
            fix = "name one with --dataset_config" if parameter == "dataset_name" else alone
            raise InputError(f"`{parameter}` is '{name}', which has the configurations {known}: {fix}.") from error
        if path.is_dir():
            for file in sorted(each for each in path.rglob("*") if _suffix(str(each)) in _FILE_BUILDERS):
                _load_file(str(file), streaming, parameter)  # says which one it is
            raise InputError(
                f"`{parameter}` is the folder '{name}', whose files cannot be read together: give files of one kind "
                f"and with the same columns. What failed: {_reason(error)}"
            ) from error
        raise InputError(
            f"`{parameter}` is '{name}', which is neither a file nor a folder here, and the Hub did not give it "
            f"either: {error}"
        ) from error


def _check_exists(name: str | None, parameter: str) -> None:
    """Refuse a path where there is neither a file nor a folder."""
    path = Path(name or "")
    looks_like_path = path.is_absolute() or str(name).startswith(".") or path.suffix in _DATA_SUFFIXES
    if (path.exists() or looks_like_path) and not (path.is_file() or path.is_dir()):
        raise InputError(
            f"`{parameter}` is '{name}', but there is no such file or folder: correct the path, or give an id on the "
            "Hub such as 'org/dataset'."
        )


def _check_no_pattern(name: str, parameter: str) -> None:
    """Refuse a folder of files by whose path datasets would read other folders: it takes it for a pattern."""
    path = os.path.abspath(name)
    if os.path.isdir(path) and glob.has_magic(path):
        raise InputError(
            f"`{parameter}` is the folder '{path}', and datasets reads `[`, `*` and `?` in it as a pattern, for other "
            "folders: rename it, or give a file."
        )


def _load_file(name: str, streaming: bool, parameter: str) -> DatasetDict | IterableDatasetDict:
    builder = _FILE_BUILDERS[_suffix(name)]
    try:
        if builder == "json":
            _check_encoding(name)
        path = glob.escape(os.path.abspath(name))  # else a `[1]` in a name stands for another file
        splits = load_dataset(builder, data_files={"train": path}, streaming=streaming)
        next(iter(splits["train"]), None)  # a stream is not read before
        return splits
    except (DatasetsError, StopIteration, ValueError) as error:  # pyarrow's is a `ValueError`
        shape = "one JSON object a row, in UTF-8" if builder == "json" else "a whole parquet file"
        found = json_defect(name) if builder == "json" and not isinstance(error, InputError) else None
        reason = found or _reason(error) or "it holds no row"
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
    with _open(name) as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                # Without its cause: this is the reason that a user is told
                raise InputError(f"line {number} is not UTF-8: {error.reason} {line[error.start]:#04x}") from None


def json_defect(name: str) -> str | None:
    """
    Return what is wrong with a file of JSON, an object a line or an array of them, and in which line, counted from 1.

    `None` if nothing is. The libraries count rows of a block, without the empty lines.
    """
    number = None  # of the line, where each has an object of its own
    with _open(name) as file:
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
    return None


def _json_files(data_files: Any) -> list[str]:
    """Return the local files of JSON that are named, alone, in a list or by split."""
    if isinstance(data_files, Mapping):
        data_files = list(data_files.values())
    if isinstance(data_files, list):
        return [file for each in data_files for file in _json_files(each)]
    is_json = isinstance(data_files, str) and _FILE_BUILDERS.get(_suffix(data_files)) == "json"
    return [data_files] if is_json and os.path.isfile(data_files) else []


def _suffix(name: str) -> str:
    return Path(name.removesuffix(".gz")).suffix


def _open(name: str) -> Any:
    return gzip.open(name) if name.endswith(".gz") else open(name, "rb")


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
    with apart_from_saved(dataset):
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
