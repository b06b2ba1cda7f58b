"""The data that the flags of `train_bapo.py` ask for: to train on, to evaluate on, in the columns that both read."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trl import DatasetMixtureConfig, get_dataset

from ..bapo_config import BAPOConfig
from ..errors import InputError
from ..tasks import MadeTask
from .arguments import EMBEDDED, BAPOScriptArguments
from .datasets import Data, common_hub_id, hold_out, load_splits, pick_eval_split, pick_split
from .prompts import PromptFormat, format_prompts


def has_data(script_args: BAPOScriptArguments, dataset_args: DatasetMixtureConfig) -> bool:
    """Tell whether any data is asked for."""
    return bool(script_args.dataset_name or script_args.eval_dataset or dataset_args.datasets)


def load_data(
    script_args: BAPOScriptArguments,
    training_args: BAPOConfig,
    dataset_args: DatasetMixtureConfig,
    task: MadeTask | None = None,
) -> Data:
    """
    Load what the run trains on and what it evaluates on.

    Args:
        script_args ([`~arguments.BAPOScriptArguments`]): Flags of the script.
        training_args ([`BAPOConfig`]): Whether the run trains, and whether it evaluates.
        dataset_args ([`~trl.DatasetMixtureConfig`]): A mixture, which comes before `dataset_name`.
        task ([`~tasks.MadeTask`], *optional*): A task that the package makes, which comes before both.

    Returns:
        [`~datasets.Data`]: With `train` only if the run trains, `test` only if it evaluates.

    Raises:
        ValueError: If no data is named, or it cannot be had, or two flags contradict one another.
    """
    if script_args.eval_dataset is not None and script_args.eval_fraction is not None:
        raise InputError("`eval_dataset` and `eval_fraction` are both set: leave one of them out.")
    hub_id: str | None = None
    train: Any = None
    splits: Any = None
    if task is not None:
        title = task.name
        train, splits = task.train_dataset, {script_args.dataset_test_split: task.test_dataset}
    elif dataset_args.datasets:
        title, hub_id = "a dataset mixture", common_hub_id(part.path for part in dataset_args.datasets)
        splits = get_dataset(dataset_args)
    elif script_args.dataset_name:
        title, hub_id = script_args.dataset_name, common_hub_id([script_args.dataset_name])
        splits = load_splits(script_args.dataset_name, script_args.dataset_config, script_args.dataset_streaming)
    elif script_args.eval_dataset is None or training_args.do_train:
        raise InputError(
            "`dataset_name` is not set: give a json, jsonl or parquet file, a dataset folder, an id on the Hub, or "
            f"'{EMBEDDED}' for the built-in task (or list `datasets` in the config file)."
        )
    else:
        title = script_args.eval_dataset
    if train is None and (training_args.do_train or script_args.eval_fraction is not None):
        train = pick_split(splits, script_args.dataset_train_split, "dataset_train_split")
    if script_args.eval_fraction is not None:
        train, test = hold_out(train, script_args.eval_fraction)
        return Data(title, train, test, hub_id, f"{script_args.eval_fraction:g} of {title}")
    if script_args.eval_dataset is not None:
        splits = load_splits(script_args.eval_dataset, parameter="eval_dataset")
        test = pick_eval_split(splits, script_args.dataset_test_split)
        return Data(title, train, test, hub_id, script_args.eval_dataset)
    if not training_args.do_eval:
        return Data(title, train, None, hub_id)
    if training_args.do_train:  # the only split is trained on
        return Data(title, train, pick_split(splits, script_args.dataset_test_split, "dataset_test_split"), hub_id)
    return Data(title, None, pick_eval_split(splits, script_args.dataset_test_split), hub_id)


def format_data(data: Data, script_args: BAPOScriptArguments, load_tokenizer: Callable[[], Any]) -> Data:
    """
    Give all prompts the columns that trainer and rewards read.

    Args:
        data ([`~datasets.Data`]): As it was loaded.
        script_args ([`~arguments.BAPOScriptArguments`]): Flags of the script.
        load_tokenizer (`Callable[[], Any]`): Loads the tokenizer. Called only where chats may be formed.

    Returns:
        [`~datasets.Data`]: The same rows; errors as in [`~inputs.prompt_checks.format_prompts`].
    """
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
