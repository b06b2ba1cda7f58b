"""
`--dry_run true`, and [`dry_run`] in Python: what a run would do, its prompts, and the rewards of a made completion.

No weights are loaded.
"""

import asyncio
import inspect
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datasets import Dataset
from huggingface_hub import whoami
from torch import nn
from transformers import AutoConfig, AutoProcessor, PreTrainedModel, Trainer, TrainerState, TrainingArguments
from transformers import training_args as of_transformers
from transformers.integrations import get_reporting_integration_callbacks
from trl import get_peft_config

from ..bapo_config import BAPOConfig
from ..batch.staleness import max_staleness_in_words, mean_staleness, updates_per_generation
from ..errors import InputError
from ..evaluation.answers import gold_answers
from ..inputs.prompt_checks import check_number_of_prompts
from ..inputs.reward_checks import rewards_defect
from ..inputs.setting_warnings import setting_warnings
from ..report.facts import method_name
from .commands import TRAIN, Command
from .console import aligned_rows, settings_table
from .data.prompts import TEXT_FOR_CHAT, check_fit, longest_prompt, tokens_of
from .memory import Sharding, memory_table, plan_memory
from .models import load_processing_class, merged_folder, merges_alone, parts_of
from .preparation import Inputs, gather_inputs, init_kwargs_of, quantization_of
from .run.output_folder import check_checkpoint, check_start
from .settings.parser import Settings, parse_arguments


_PROMPT_CHARACTERS = 400


def dry_run(
    args: BAPOConfig,
    model: str | PreTrainedModel,
    reward_funcs: Any,
    train_dataset: Any,
    processing_class: Any = None,
    peft_config: Any = None,
    quantization_config: Any = None,
    mean_length: int | None = None,
    sharding: Sharding | None = None,
) -> str:
    """
    Return the plan of a run, to be printed. Nothing is written, and no weights are loaded.

    It makes no trainer, so it does not find the settings that TRL's trainer rejects when it is made.

    Args:
        args ([`BAPOConfig`]): Settings of the run.
        model (`str` or [`~transformers.PreTrainedModel`]): Model to train, as [`BAPOTrainer`] takes it.
        reward_funcs (`RewardFunc` or `list[RewardFunc]`): Reward functions, as [`BAPOTrainer`] takes them. Each is
            called once.
        train_dataset (`Dataset` or `IterableDataset`): Prompts to train on; with `do_train` false, to evaluate on.
        processing_class ([`~transformers.PreTrainedTokenizerBase`] or [`~transformers.ProcessorMixin`], *optional*):
            Tokenizer; by default the model's.
        peft_config ([`~peft.PeftConfig`], *optional*): Adapter to train, as [`BAPOTrainer`] takes it.
        quantization_config ([`~transformers.BitsAndBytesConfig`], *optional*): How the weights are quantized.
        mean_length (`int`, *optional*): Mean number of tokens of a completion, to estimate the memory for.
        sharding ([`~script.memory.Sharding`], *optional*): How the model is divided over the processes; by
            default, as this process' launcher says.

    Raises:
        ValueError: For a tokenizer with more tokens than the model, prompts that the model would fail at, too few
            prompts, and rewards that the trainer would reject. What a reward function raises comes through.

    Example:

    ```python
    print(dry_run(args, "Qwen/Qwen2.5-0.5B-Instruct", reward, dataset))
    ```
    """
    if isinstance(model, str):
        init: Any = args.model_init_kwargs or {}
        name, settings = model, {"revision": init.get("revision"), "trust_remote_code": args.trust_remote_code}
        config = AutoConfig.from_pretrained(model, **settings)
        dtype = init.get("dtype") or "float32"  # TRL's default
    else:
        name, settings, config, dtype = model.config._name_or_path, {}, model.config, model.dtype
        peft_config = peft_config or getattr(model, "active_peft_config", None)
    processing_class = processing_class or AutoProcessor.from_pretrained(name, **settings)
    check_fit(config, processing_class, args, {"train": train_dataset})
    if args.do_train or not args.do_eval:
        check_number_of_prompts(train_dataset, args)
    functions = reward_funcs if isinstance(reward_funcs, Sequence) else [reward_funcs]
    of_model = {"peft_config": peft_config, "quantization_config": quantization_config, "mean_length": mean_length}
    return _describe(args, config, dtype, functions, train_dataset, processing_class, sharding, **of_model)


def _describe(
    args: BAPOConfig,
    config: Any,
    dtype: Any,
    functions: Sequence[Any],
    dataset: Any,
    processing_class: Any,
    sharding: Sharding | None,
    **of_model: Any,
) -> str:
    """Return the plan of a run whose prompts fit the model; `of_model` are arguments of [`~memory.plan_memory`]."""
    _, longest = longest_prompt(dataset, processing_class, args.chat_template_kwargs)
    if args.do_eval and not args.do_train:
        parts = [f"Evaluation only, {args.num_generations_eval} completions per prompt"]
    else:
        parts = [f"{settings_table(args)}\n{_staleness(args)}"]
        if args.max_completion_length is not None:
            dtype = config.dtype or "float32" if dtype == "auto" else dtype
            columns = plan_memory(args, config, dtype, longest, sharding=sharding or _sharding(args), **of_model)
            parts.append(memory_table(args, columns))
    parts.append(_prompts(args, dataset, processing_class, longest))
    parts.append(example_rewards(functions, next(iter(dataset)), processing_class))
    return "\n\n".join(parts)


def _sharding(args: BAPOConfig) -> Sharding:
    """Return how a model is divided over the processes, by the settings and the launcher of this process."""
    plugin = getattr(args, "deepspeed_plugin", None)
    if plugin is not None:
        return Sharding.of_zero(plugin.deepspeed_config.get("zero_optimization", {}), args.world_size)
    return Sharding(args.world_size, stage=3 if os.environ.get("ACCELERATE_USE_FSDP") == "true" else 0)


def _staleness(args: BAPOConfig) -> str:
    mean = f"{mean_staleness(args):g} policy versions"
    if args.uses_replay or args.uses_partial_rollouts:
        mean += " for fresh samples; unknown for the others before the run"
    rows = {
        "updates per generation": f"{updates_per_generation(args):g}",
        "max staleness": max_staleness_in_words(args),
        "mean staleness": mean,
    }
    return aligned_rows(rows.items())


def _prompts(args: BAPOConfig, dataset: Any, processing_class: Any, longest: int) -> str:
    tokenizer, prompt = getattr(processing_class, "tokenizer", processing_class), next(iter(dataset))["prompt"]
    lines = [f"Prompts: {len(dataset) if isinstance(dataset, Dataset) else 'a stream'}, at most {longest} tokens"]
    if isinstance(prompt, str) and getattr(tokenizer, "chat_template", None) is not None:
        lines.append(f"  {TEXT_FOR_CHAT}")
    text = tokenizer.decode(tokens_of(prompt, tokenizer, args.chat_template_kwargs))
    shown = text if len(text) <= _PROMPT_CHARACTERS else f"{text[:_PROMPT_CHARACTERS]} ..."
    return "\n".join(
        [*lines, "  first prompt, as the model gets it:", *(f"  | {line}" for line in shown.splitlines())]
    )


def example_rewards(functions: Sequence[Any], row: Mapping[str, Any], processing_class: Any) -> str:
    """
    Call each reward function once, as the trainer would with two equal samples, and return their rewards as lines.

    The made completion ends with the answer in the `solution` of the row, boxed, where it has one. A model that is a
    reward function is not called. Raises an `InputError` for what the trainer would reject.
    """
    answer = next(iter(gold_answers(row.get("solution"))), None)
    text = "The answer is 1." if answer is None else f"The answer is \\boxed{{{answer}}}."
    prompt = row["prompt"]
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    samples = {
        "prompts": [prompt] * 2,
        "completions": [text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]] * 2,
        "completion_ids": [tokenizer(text, add_special_tokens=False)["input_ids"]] * 2,
    }
    others = {
        **{name: [value] * 2 for name, value in row.items() if name not in ("prompt", "completion", "completion_ids")},
        "trainer_state": TrainerState(),
        "log_extra": lambda *logged: None,
        "log_metric": lambda *logged: None,
    }
    lines = [f'Rewards of an example completion, "{text}"']
    for function in functions:
        if isinstance(function, (str, nn.Module)):
            continue
        name = getattr(function, "__name__", type(function).__name__)
        returned = function(**samples, **others)  # as TRL does: a column `prompts` is one too many
        if inspect.iscoroutine(returned):
            with ThreadPoolExecutor(1) as thread:  # in a notebook, this one runs a loop already
                returned = thread.submit(asyncio.run, returned).result()
        returned = list(returned) if hasattr(returned, "__next__") else returned
        defect = rewards_defect(returned, 2)
        reward = None if defect or returned[0] is None else float(returned[0])
        if reward is not None and math.isinf(reward):
            defect = f"{reward:g}: return a finite number, or None where it does not apply"
        if defect:
            raise InputError(f'The reward function `{name}` returned {defect} (given the first prompt and "{text}").')
        lines.append(f"  {name}: {'none' if reward is None else f'{reward:g}'}")
    return "\n".join(lines)


# The command


_DRY_RUN = "dry run, no weights are loaded, nothing is written."


def print_plan(
    arguments: Sequence[str],
    command: Command = TRAIN,
    processes: int | None = None,
    sharding: Sharding | None = None,
) -> None:
    """
    Print what a run with these flags would do, or raise the first error that it would raise.

    `processes` and `sharding` are by default those of the launcher that started this process.

    Raises:
        InputError: For what would stop the run. Where only a GPU is missing, after the plan, which is that of one.
        SystemExit: For flags that cannot be read, as in [`~settings.parser.parse_arguments`].
    """
    rejection = None
    processes = processes or int(os.environ.get("WORLD_SIZE", 1))
    with as_in_processes(processes):
        try:
            settings = parse_arguments(arguments, command)
        except InputError as error:
            with as_in_processes(processes, on_gpus=True):
                settings = parse_arguments(arguments, command)
            rejection = error
        text = _plan(settings, sharding)
    if settings.training.distributed_state.is_main_process:
        print(text, flush=True)
    if rejection is not None:
        raise rejection


def _plan(settings: Settings, sharding: Sharding | None) -> str:
    script_args, args, model_args, _ = settings
    check_checkpoint(args)
    parts = parts_of(model_args.model_name_or_path, model_args.model_revision)
    check_start(settings, parts)
    if merges_alone(settings):
        load_processing_class(parts, args.trust_remote_code)
        return f"Merge of the adapter {parts[0][0]} into its base {parts[1][0]}, in {merged_folder(args)}: {_DRY_RUN}"
    inputs = gather_inputs(settings, parts)
    _check_as_the_trainer(args, inputs)
    (_, revision), peft_config = inputs.parts[-1], get_peft_config(model_args)
    if len(inputs.parts) > 1:  # an adapter has the configuration of its base
        from peft import PeftConfig

        adapter, revision_of_adapter = inputs.parts[0]
        peft_config = PeftConfig.from_pretrained(adapter, revision=revision_of_adapter)
    args.model_init_kwargs = init_kwargs_of(args, model_args, revision)
    of_data = (inputs.reward_funcs, inputs.data.prompts, inputs.processing_class)
    plan = _describe(  # the prompts were checked as the inputs were gathered
        args,
        inputs.config,
        args.model_init_kwargs["dtype"],
        *of_data,
        sharding,
        peft_config=peft_config,
        quantization_config=quantization_of(args, model_args),
        mean_length=script_args.dry_run_mean_length,
    )
    method = method_name(args) if args.do_train else "Evaluation"
    warned = setting_warnings(args, inputs.settings_of_model) if args.do_train else ()
    title = inputs.data.title if args.do_train else inputs.data.test_title or inputs.data.title
    return "\n\n".join([f"{method} on {title}: {_DRY_RUN}", plan, *(f"Warning: {each}" for each in warned)])


def _check_as_the_trainer(args: BAPOConfig, inputs: Inputs) -> None:
    """Raise an `InputError` for what TRL and transformers would reject once the weights are loaded."""
    weights, functions = args.reward_weights, inputs.reward_funcs
    if weights is not None and len(weights) != len(functions):
        raise InputError(
            f"`reward_weights` is {weights}, for {len(functions)} reward functions: give a number for each."
        )
    model: Any = nn.Linear(1, 1)
    checks: dict[str, Callable] = {
        "report_to": lambda: [tracker() for tracker in get_reporting_integration_callbacks(args.report_to)],
        "optim": lambda: args.do_train and Trainer.get_optimizer_cls_and_kwargs(args, model),
        "push_to_hub": lambda: args.do_train and args.push_to_hub and whoami(args.hub_token),
    }
    for name, check in checks.items():
        try:
            check()
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            raise InputError(f"`{name}` is {getattr(args, name)}: {str(error).splitlines()[0]}") from error
    folder = Path(args.output_dir).absolute()
    above = next(path for path in (folder, *folder.parents) if path.exists())
    if not (above.is_dir() and os.access(above, os.W_OK)):
        raise InputError(f"`output_dir` is {args.output_dir}, but {above} is no folder that can be written to.")


@contextmanager
def as_in_processes(processes: int, on_gpus: bool = False) -> Iterator[None]:
    """
    Let settings be checked as if they were read in this number of processes.

    With `on_gpus`, as if on a machine with GPUs that compute in bfloat16.
    """
    world_size, has_bf16 = TrainingArguments.world_size, of_transformers.is_torch_bf16_gpu_available
    TrainingArguments.world_size = property(lambda self: processes)  # type: ignore[assignment,method-assign]
    if on_gpus:
        of_transformers.is_torch_bf16_gpu_available = lambda: True
    try:
        yield
    finally:
        TrainingArguments.world_size = world_size  # type: ignore[method-assign]
        of_transformers.is_torch_bf16_gpu_available = has_bf16
