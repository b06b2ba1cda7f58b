"""From the settings to a trainer: data, rewards, model. What cannot work is rejected before the weights load."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoConfig, ProgressCallback
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from trl import GRPOConfig, ModelConfig, get_peft_config, get_quantization_config

from ..bapo_config import BAPOConfig
from ..checkpoints.rank_errors import on_main_process
from ..evaluation.sampling import EvaluatedGRPOTrainer, EvaluatedTrainer
from ..inputs.generation_config import check_can_be_saved, check_for_partial_rollouts, settings_of_model
from ..inputs.prompt_checks import check_number_of_prompts
from ..report.callback import ReportCallback
from ..upstream.cpu_speed import base_dtype
from ..vllm_server.mismatch import trl_sampler_for
from .console import ProgressBar
from .data.columns import format_data
from .data.load import Data, load_data
from .data.prompts import check_chat_template, check_fit, check_prompts, check_tokenizer
from .models import (
    Parts,
    check_can_merge,
    check_packages,
    fetch_model,
    load_adapter,
    load_generation_config,
    load_processing_class,
)
from .rewards import resolve_names
from .settings.arguments import EMBEDDED
from .settings.methods import TRL
from .settings.parser import Settings


Trainer = EvaluatedTrainer | EvaluatedGRPOTrainer


@dataclass(frozen=True)
class Inputs:
    """What a trainer is made of, but for the weights."""

    data: Data
    reward_funcs: list[Any]
    parts: Parts  # of the model, which is a folder or an id on the Hub
    config: Any  # of the model
    processing_class: Any  # tokenizer or processor
    extract_answer: Callable[[str], str | None] | None  # finds the answer in a completion
    settings_of_model: dict[str, Any]  # those of its `generation_config` that a generation uses


class ReportUntilTheEnd(ReportCallback):
    """Leaves out the report at the end of the training: the command writes it when the rest is saved."""

    def on_train_end(self, args, state, control, **kwargs):
        pass


def gather_inputs(settings: Settings, parts: Parts) -> Inputs:
    """Load data and tokenizer, form the prompts, and reject what cannot be trained or evaluated on."""
    script_args, training_args, model_args, _ = settings
    task, reward_funcs, extract_answer = resolve_names(settings)
    data = load_data(settings, task)
    if script_args.dataset_name == EMBEDDED and training_args.use_cpu:
        torch.set_num_threads(1)  # so small a model gains nothing from more, and loses a lot on a busy machine
    check_packages(settings)
    target = model_args.lora_target_modules
    if isinstance(target, str) and target.isidentifier():  # else a pattern for the whole path of a module
        model_args.lora_target_modules = [target]
    parts = [(fetch_model(name, training_args), revision) for name, revision in parts]
    processing_class = load_processing_class(parts, training_args.trust_remote_code)
    if script_args.merge_adapter:
        check_can_merge(parts)
    check_tokenizer(getattr(processing_class, "tokenizer", processing_class))
    data = format_data(data, script_args, processing_class)
    name, revision = parts[-1]  # an adapter has the configuration of its base
    config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=training_args.trust_remote_code)
    on_main_process(lambda: _check_data(data, processing_class, config, training_args))  # reads all prompts
    generation_config = load_generation_config(parts, training_args.trust_remote_code)
    of_model = settings_of_model(training_args, generation_config, processing_class)
    if training_args.do_train:
        trains_adapter = model_args.use_peft or len(parts) > 1
        if script_args.merge_adapter or not trains_adapter:
            check_can_be_saved(generation_config)
        if training_args.uses_partial_rollouts:
            check_for_partial_rollouts(of_model)
    return Inputs(data, reward_funcs, parts, config, processing_class, extract_answer, of_model)


def make_trainer(settings: Settings, inputs: Inputs) -> Trainer:
    """Load the model and make its trainer; set `model_init_kwargs` in the settings."""
    script_args, training_args, model_args, dataset_args = settings
    data = inputs.data
    model, quantization = _model_argument(inputs, training_args, model_args)
    peft_config = get_peft_config(model_args)
    if peft_config is not None:
        peft_config.revision = model_args.model_revision  # of its base, for who loads it
    eval_dataset = data.test if training_args.do_eval else None
    trainer_class: type[Trainer] = EvaluatedTrainer
    if script_args.method == TRL:
        trainer_class, training_args = EvaluatedGRPOTrainer, copy(training_args)
        training_args.epsilon = GRPOConfig.epsilon  # which `BAPOTrainer` sets from its bounds
    with trl_sampler_for(training_args) if script_args.method == TRL else nullcontext():
        trainer = trainer_class(
            model,
            inputs.reward_funcs,
            training_args,
            train_dataset=data.prompts,
            eval_dataset=eval_dataset,
            processing_class=inputs.processing_class,
            quantization_config=quantization,
            peft_config=peft_config,
        )
    if not training_args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        if sys.stderr.isatty():
            trainer.add_callback(ProgressBar)
    trainer.add_callback(ReportUntilTheEnd({**vars(script_args), **vars(model_args), **vars(dataset_args)}))
    trainer.phase_clock.logs_totals = True
    return trainer


def _check_data(data: Data, processing_class: Any, config: Any, training_args: BAPOConfig) -> None:
    """Reject prompts and a tokenizer that do not suit each other or the model (`InputError`)."""
    datasets = {"train": data.train, "eval": data.test}
    for name, dataset in datasets.items():
        check_prompts(dataset, name)
        check_chat_template(dataset, processing_class, training_args.chat_template_kwargs)
    if training_args.do_train:
        check_number_of_prompts(data.train, training_args)
    check_fit(config, processing_class, training_args, datasets)


def init_kwargs_of(training_args: BAPOConfig, model_args: ModelConfig, revision: str | None) -> dict[str, Any]:
    """Return the arguments that the model is loaded with."""
    is_quantized = model_args.load_in_4bit or model_args.load_in_8bit
    return {
        "revision": revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype or base_dtype(training_args, model_args.use_peft, is_quantized),
        "trust_remote_code": training_args.trust_remote_code,
        **(training_args.model_init_kwargs or {}),  # type: ignore[dict-item]
    }


def quantization_of(training_args: BAPOConfig, model_args: ModelConfig) -> Any:
    """Return how bitsandbytes quantizes the base weights, if it does: 4-bit layers compute in autocast's type."""
    types = {"bfloat16": training_args.bf16, "float16": training_args.fp16}
    own = None if model_args.dtype == "auto" else model_args.dtype
    return get_quantization_config(replace(model_args, dtype=next((name for name in types if types[name]), own)))


def _model_argument(inputs: Inputs, training_args: BAPOConfig, model_args: ModelConfig) -> tuple[Any, Any]:
    """Return what the trainer is to be given: a model's name and its quantization, or a saved adapter, loaded."""
    init_kwargs = init_kwargs_of(training_args, model_args, model_args.model_revision)
    quantization = quantization_of(training_args, model_args)
    if len(inputs.parts) == 1:
        training_args.model_init_kwargs = init_kwargs
        return inputs.parts[0][0], quantization
    del init_kwargs["revision"]  # of the adapter: that of its base stands beside it
    if quantization is not None:
        init_kwargs["quantization_config"] = quantization
    if training_args.world_size > 1 or is_deepspeed_zero3_enabled():
        init_kwargs["device_map"] = None
    return load_adapter(inputs.parts, is_trainable=training_args.do_train, **init_kwargs), None
