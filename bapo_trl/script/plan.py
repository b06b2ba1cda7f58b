"""
`--dry_run true`, and [`dry_run`] in Python: what a run would do, its prompts, and the rewards of a made completion.

No weights are loaded.
"""

import asyncio
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from huggingface_hub import whoami
from huggingface_hub.errors import HfHubHTTPError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoProcessor,
    PreTrainedModel,
    Trainer,
    TrainerState,
    TrainingArguments,
)
from transformers import training_args as of_transformers
from transformers.integrations import get_reporting_integration_callbacks
from trl import get_peft_config

from ..bapo_config import BAPOConfig
from ..batch.staleness import max_staleness_in_words, mean_staleness
from ..errors import InputError
from ..evaluation.answers import gold_answers
from ..inputs.reward_checks import rewards_defect
from ..inputs.setting_warnings import setting_warnings
from ..report.facts import method_name
from .command_line import Settings, parse_arguments
from .commands import TRAIN, Command
from .console import aligned_rows
from .earlier_run import check_checkpoint, check_start
from .memory import GIB, MemoryPlan, Sharding, plan_memory
from .models import Parts, load_processing_class, merged_folder, merges_alone, parts_of
from .preparation import Inputs, gather_inputs, init_kwargs_of, load_data_and_rewards, quantization_of
from .prompts import TEXT_FOR_CHAT, Prompts, check_fit, look_at_prompts, room_of


@dataclass(frozen=True)
class Reward:
    """What a reward function gave to a made completion."""

    name: str
    completion: str
    value: float | None = None  # `None` if it gave none
    error: str | None = None  # what it raised, or what is wrong with what it returned


def try_rewards(functions: Sequence[Any], row: Mapping[str, Any], processing_class: Any) -> list[Reward]:
    """
    Call each reward function once, as the trainer would with two equal samples. A model that is one is not called.

    The made completion ends with the answer in the `solution` of the row, boxed, where it has one.
    """
    answer = next(iter(gold_answers(row.get("solution"))), None)
    text = "The answer is 1." if answer is None else f"The answer is \\boxed{{{answer}}}."
    prompt = row["prompt"]
    completion: Any = text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    samples = {
        "prompts": [prompt] * 2,
        "completions": [completion] * 2,
        "completion_ids": [tokenizer(text, add_special_tokens=False)["input_ids"]] * 2,
    }
    others = {
        **{name: [value] * 2 for name, value in row.items() if name not in ("prompt", "completion", "completion_ids")},
        "trainer_state": TrainerState(),
        "log_extra": lambda *logged: None,
        "log_metric": lambda *logged: None,
    }
    tried = [function for function in functions if not isinstance(function, (str, nn.Module))]
    return [_try(function, samples, others, text) for function in tried]


def _try(function: Callable, samples: Mapping[str, Any], others: Mapping[str, Any], text: str) -> Reward:
    name = getattr(function, "__name__", type(function).__name__)
    try:
        returned = function(**samples, **others)  # as TRL does: a column `prompts` is one too many
        if inspect.iscoroutine(returned):
            with ThreadPoolExecutor(1) as thread:  # in a notebook, this one runs a loop already
                returned = thread.submit(asyncio.run, returned).result()
    except Exception as error:  # whatever a user's function raises is what is asked for
        return Reward(name, text, error=f"raised {type(error).__name__}: {error}")
    returned = list(returned) if hasattr(returned, "__next__") else returned
    defect = rewards_defect(returned, 2)
    value = None if defect or returned[0] is None else float(returned[0])
    if value is not None and math.isinf(value):
        defect = f"{value:g}: return a finite number, or None where it does not apply"
    return Reward(name, text, value, None if defect is None else f"returned {defect}")


_SCALES = (1, 8, 32)  # processes whose arithmetic is shown beside that of the run
_PROMPT_CHARACTERS = 400


@dataclass(frozen=True)
class Counts:
    """Numbers of a run on so many processes, of which each makes `steps_per_generation` micro-batches."""

    processes: int
    prompts: float  # of a generation
    samples: int  # of a generation
    samples_per_update: int
    updates_per_generation: float  # not rounded
    generations_per_epoch: int | None  # `None` for a stream
    updates_per_epoch: float | None
    rejection: str | None  # why no run with that many processes is possible


def count(args: BAPOConfig, processes: int, num_prompts: int | None) -> Counts:
    """Return the numbers of a run on so many processes and prompts; `None` for a stream."""
    micro_batch = args.per_device_train_batch_size * processes
    samples = args.generation_batch_size if args.has_fixed_samples else args.steps_per_generation * micro_batch
    updates = samples / micro_batch * args.num_iterations / args.gradient_accumulation_steps
    prompts = samples / args.num_generations
    generations = None if num_prompts is None else int(num_prompts // prompts)
    too_few = f"a generation needs {prompts:g} prompts, but there are {num_prompts}"
    return Counts(
        processes=processes,
        prompts=prompts,
        samples=samples,
        samples_per_update=micro_batch * args.gradient_accumulation_steps,
        updates_per_generation=updates,
        generations_per_epoch=generations,
        updates_per_epoch=None if generations is None else generations * updates,
        rejection=too_few if generations == 0 else None,
    )


@dataclass(frozen=True)
class DryRun:
    """The plan of a run, to be printed: sample counts, staleness, memory, prompts and example rewards."""

    args: BAPOConfig
    counts: list[Counts]  # on its own number of processes first; empty for an evaluation alone
    num_prompts: int | None  # `None` for a stream
    prompts: Prompts | None = None  # `None` without data or a tokenizer
    rewards: Sequence[Reward] = ()
    memory: MemoryPlan | None = None  # `None` without a model or a limit of tokens, and for an evaluation alone

    @property
    def problems(self) -> list[str]:
        """What the run would stop at, each in a sentence."""
        errors = [f"On {_processes(each)}, {each.rejection}." for each in self.counts[:1] if each.rejection]
        return errors + [
            f'The reward function `{each.name}` {each.error} (given the first prompt and "{each.completion}").'
            for each in self.rewards
            if each.error
        ]

    def tables(self) -> str:
        """Return all but the problems."""
        parts = [_counts(self), _staleness(self)] if self.counts else [_evaluation(self)]
        if self.memory is not None:
            parts.append(_memory(self.args, self.memory))
        if self.prompts is None:
            parts.append("Prompts and rewards are unknown: see the error below.")
        else:
            parts += [_prompts(self.args, self.prompts), _rewards(self.rewards)]
        return "\n\n".join(part for part in parts if part)

    def __str__(self) -> str:
        return "\n\nThe run would stop: ".join([self.tables(), *self.problems])


def dry_run(
    args: BAPOConfig,
    model: str | PreTrainedModel,
    reward_funcs: Any,
    train_dataset: Any,
    processing_class: Any = None,
    processes: int | None = None,
    peft_config: Any = None,
    quantization_config: Any = None,
    mean_length: int | None = None,
    sharding: Sharding | None = None,
) -> DryRun:
    """
    Return the plan of a run. Nothing is written, and no weights are loaded.

    It makes no trainer, so it does not find the settings that TRL's trainer rejects when it is made.

    Args:
        args ([`BAPOConfig`]): Settings of the run.
        model (`str` or [`~transformers.PreTrainedModel`]): Model to train, as [`BAPOTrainer`] takes it.
        reward_funcs (`RewardFunc` or `list[RewardFunc]`): Reward functions, as [`BAPOTrainer`] takes them. Each is
            called once.
        train_dataset (`Dataset` or `IterableDataset`): Prompts to train on; with `do_train` false, to evaluate on.
        processing_class ([`~transformers.PreTrainedTokenizerBase`] or [`~transformers.ProcessorMixin`], *optional*):
            Tokenizer; by default the model's.
        processes (`int`, *optional*): Processes that train; by default those of this process' launcher.
        peft_config ([`~peft.PeftConfig`], *optional*): Adapter to train, as [`BAPOTrainer`] takes it.
        quantization_config ([`~transformers.BitsAndBytesConfig`], *optional*): How the weights are quantized.
        mean_length (`int`, *optional*): Mean number of tokens of a completion, to estimate the memory for.
        sharding ([`~script.memory.Sharding`], *optional*): How the model is divided over the processes; by
            default, as this process' launcher says.

    Raises:
        ValueError: For a tokenizer with more tokens than the model, and prompts that the model would fail at. A reward
            function that fails is among the `problems` of what is returned.

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
        dtype = config.dtype or "float32" if dtype == "auto" else dtype
    else:
        name, settings, config, dtype = model.config._name_or_path, {}, model.config, model.dtype
        peft_config = peft_config or getattr(model, "active_peft_config", None)
    processing_class = processing_class or AutoProcessor.from_pretrained(name, **settings)
    room = room_of(config.get_text_config(), args)
    prompts = look_at_prompts(train_dataset, processing_class, room, args.chat_template_kwargs)
    check_fit(config, processing_class, args, [("train", prompts if isinstance(train_dataset, Dataset) else None)])
    functions = reward_funcs if isinstance(reward_funcs, Sequence) else [reward_funcs]
    plan = arithmetic_of(args, train_dataset, processes)
    memory = None
    if plan.counts and args.max_completion_length is not None:
        here = plan.counts[0]
        sharding = sharding or sharding_of(args, here.processes)
        rows = here.samples // here.processes
        of_model = (peft_config, quantization_config, mean_length, sharding)
        memory = plan_memory(args, config, dtype, prompts.lengths[1.0], rows, *of_model)
    return replace(
        plan,
        memory=memory,
        prompts=prompts,
        rewards=try_rewards(functions, next(iter(train_dataset)), processing_class),
    )


def arithmetic_of(args: BAPOConfig, train_dataset: Any, processes: int | None = None) -> DryRun:
    """Return what the settings and the number of prompts tell, as in [`dry_run`]; `None` for data that lacks."""
    processes = processes or processes_of_launcher()
    num_prompts = len(train_dataset) if isinstance(train_dataset, Dataset) else None
    scales = dict.fromkeys((processes, *_SCALES)) if args.do_train or not args.do_eval else ()
    return DryRun(args, [count(args, scale, num_prompts) for scale in scales], num_prompts)


def processes_of_launcher() -> int:
    """Return the number of processes of the launcher that started this one."""
    return int(os.environ.get("WORLD_SIZE", 1))


def sharding_of(args: BAPOConfig, processes: int) -> Sharding:
    """Return how a model is divided over the processes, by the settings and the launcher of this process."""
    plugin = getattr(args, "deepspeed_plugin", None)
    if plugin is not None:
        zero = plugin.deepspeed_config.get("zero_optimization", {})
        return Sharding.of_zero(zero, processes)
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        return Sharding(processes, stage=3)
    return Sharding(processes)


def _counts(run: DryRun) -> str:
    cells = {
        "": [f"{_processes(each)}{' *' if each is run.counts[0] else ''}" for each in run.counts],
        "prompts per generation": [f"{each.prompts:g}" for each in run.counts],
        "samples per generation": [str(each.samples) for each in run.counts],
        "samples per update": [str(each.samples_per_update) for each in run.counts],
        "updates per generation": [f"{each.updates_per_generation:g}" for each in run.counts],
        "generations per epoch": [_or_dash(each.generations_per_epoch) for each in run.counts],
        "updates per epoch": [_or_dash(each.updates_per_epoch) for each in run.counts],
    }
    if not run.args.has_fixed_samples:  # else the same on any number of processes
        del cells["updates per generation"]
    widths = [max(map(len, column)) for column in zip(*cells.values(), strict=True)]
    rows = [
        (name, "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
        for name, row in cells.items()
    ]
    rejected = [f"  Not possible on {each.processes}: {each.rejection}." for each in run.counts if each.rejection]
    return "\n".join(["Sample counts by number of processes (* as launched)", aligned_rows(rows), *rejected])


def _staleness(run: DryRun) -> str:
    args, here = run.args, run.counts[0]
    mean = f"{mean_staleness(args):g} policy versions"
    if args.uses_replay or args.uses_partial_rollouts:
        mean += " for fresh samples; unknown for the others before the run"
    rows = [
        ("micro-batches per update", str(args.gradient_accumulation_steps)),
        ("updates per generation", f"{here.updates_per_generation:g}"),
        ("max staleness", max_staleness_in_words(args)),
        ("mean staleness", mean),
    ]
    where = _processes(here) if args.has_fixed_samples else "any number of processes"
    return f"Staleness, on {where}\n{aligned_rows(rows)}"


def _memory(args: BAPOConfig, plan: MemoryPlan) -> str:
    columns = list(plan.columns.values())
    switched = "sum without gradient checkpointing" if plan.checkpointing else "sum with gradient checkpointing"
    rows = {
        "weights": [each.weights for each in columns],
        "gradients": [each.gradients for each in columns],
        "optimizer states": [each.optimizer for each in columns],
        "reference model": [each.reference for each in columns],
        "activations and logits": [each.activations for each in columns],
        "vLLM": [each.sampler for each in columns],
        "sum": [each.update for each in columns],
        switched: plan.otherwise,
        f"while {plan.sampled_rows} samples are sampled": [each.sampling for each in columns],
    }
    cells = {name: [f"{value / GIB:.2f}" for value in values] for name, values in rows.items() if any(values)}
    cells = {"completions": list(plan.columns), **cells}
    widths = [max(map(len, column)) for column in zip(*cells.values(), strict=True)]
    lines = [
        (name, "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
        for name, row in cells.items()
    ]
    where = "process" if args.use_cpu else "GPU"
    title = f"Memory per {where} in GiB, estimated; micro-batches of {plan.rows} samples"
    notes = ["Not counted: images, fragmentation, and the libraries' own memory.", *plan.notes]
    return "\n".join([title, aligned_rows(lines), *(f"  {note}" for note in notes)])


def _evaluation(run: DryRun) -> str:
    completions, num_prompts = run.args.num_generations_eval or run.args.num_generations, run.num_prompts
    rows = [
        ("prompts", _or_dash(num_prompts)),
        ("completions per prompt", str(completions)),
        ("completions", "-" if num_prompts is None else str(num_prompts * completions)),
        ("completions per process and batch", str(run.args.per_device_eval_batch_size)),
    ]
    return f"Evaluation only, no training\n{aligned_rows(rows)}"


def _prompts(args: BAPOConfig, prompts: Prompts) -> str:
    names = {0.5: "median", 1.0: "longest"}
    shares = ", ".join(f"{length} ({names.get(q, f'{q:.0%}')})" for q, length in prompts.lengths.items())
    of = "" if prompts.num_prompts == prompts.num_sampled else f" ({prompts.num_sampled} tokenized)"
    count = "a stream" if prompts.num_prompts is None else f"{prompts.num_prompts} prompts"
    lines = [f"Prompts: {count}{of}", f"  tokens: {shares}"]
    if prompts.room is not None:
        room = f"longest prompt that leaves room for {args.max_completion_length} new tokens: {max(prompts.room, 0)}"
        lines.append(f"  {room}; too long: {prompts.too_long}")
    if prompts.lacks_messages:
        lines.append(f"  {TEXT_FOR_CHAT}")
    shown = prompts.first[:_PROMPT_CHARACTERS]
    more = " ..." if len(prompts.first) > len(shown) else ""
    lines += ["  first prompt, as the model gets it:", *(f"  | {line}" for line in f"{shown}{more}".splitlines())]
    return "\n".join(lines)


def _rewards(rewards: Sequence[Reward]) -> str:
    if not rewards:
        return ""
    lines = [f'Rewards of an example completion, "{rewards[0].completion}"']
    for each in rewards:
        value = "failed" if each.error else "none" if each.value is None else f"{each.value:g}"
        lines.append(f"  {each.name}: {value}")
    return "\n".join(lines)


def _processes(counts: Counts) -> str:
    return f"{counts.processes} process{'es' if counts.processes != 1 else ''}"


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


# The command


_DRY_RUN = "dry run, no weights are loaded, nothing is written."


def print_plan(
    arguments: Sequence[str],
    command: Command = TRAIN,
    processes: int | None = None,
    sharding: Sharding | None = None,
) -> None:
    """
    Print what a run with these flags would do, then raise the errors that it would raise.

    Parts that need data or a model that cannot be loaded are left out. `processes` and `sharding` are by default those
    of the launcher that started this process.

    Raises:
        InputError: At the end, for everything that would stop the run, or OSError where it is one. At once, for
            settings that cannot be read.
        SystemExit: For flags that cannot be read, as in [`~command_line.parse_arguments`].
    """
    problems: list[Exception] = []
    processes = processes or processes_of_launcher()
    with as_in_processes(processes):
        try:
            settings = parse_arguments(arguments, command)
        except InputError as rejection:  # where there is no GPU, the settings are read as on one
            with as_in_processes(processes, on_gpus=True):
                settings = parse_arguments(arguments, command)
            problems.append(rejection)
        with _collecting(problems):
            check_checkpoint(settings.training)
        parts: Parts = []
        with _collecting(problems):
            parts = parts_of(settings.model.model_name_or_path, settings.model.model_revision)
            check_start(settings, parts)
        if not merges_alone(settings):
            _print_run(settings, parts, processes, sharding, problems)
        elif len(parts) > 1:
            with _collecting(problems):
                load_processing_class(parts, settings.training.trust_remote_code)
                into = merged_folder(settings.training)
                print(f"Merge of the adapter {parts[0][0]} into its base {parts[1][0]}, in {into}: {_DRY_RUN}")
    if len(problems) == 1:
        raise problems[0]
    if problems:
        numbered = " ".join(f"({number}) {problem}" for number, problem in enumerate(problems, start=1))
        raise InputError(f"{len(problems)} problems. {numbered}")


def _print_run(
    settings: Settings, parts: Parts, processes: int, sharding: Sharding | None, problems: list[Exception]
) -> None:
    """Print what a training or an evaluation would do, and add what would stop it to the problems."""
    script_args, training_args, model_args, _ = settings
    title, prompts, inputs = script_args.dataset_name or script_args.eval_dataset or "no data", None, None
    with _collecting(problems):
        found = load_data_and_rewards(settings)
        data, prompts = found[0], found[0].prompts
        title = data.title if training_args.do_train else data.test_title or data.title
        if parts:  # else they were rejected
            inputs = gather_inputs(settings, parts, *found)
            prompts = inputs.data.prompts
    plan, mean_length = arithmetic_of(training_args, prompts, processes), None
    with _collecting(problems):
        mean_length = _mean_length(settings)
    with _collecting(problems):
        if inputs is not None:
            name, revision = inputs.parts[-1]  # an adapter has the configuration of its base
            training_args.model_init_kwargs = init_kwargs_of(training_args, model_args, revision)
            plan = dry_run(
                training_args,
                name,
                inputs.reward_funcs,
                prompts,
                inputs.processing_class,
                processes,
                peft_config=_adapter(settings, inputs.parts),
                quantization_config=quantization_of(training_args, model_args),
                mean_length=mean_length,
                sharding=sharding,
            )
            problems += map(InputError, plan.problems)
            _check_as_the_trainer(settings, inputs, problems)
    if training_args.distributed_state.is_main_process:
        method = method_name(training_args) if training_args.do_train else "Evaluation"
        print(f"{method} on {title}: {_DRY_RUN}\n\n{plan.tables()}")
        of_model = {} if inputs is None else inputs.settings_of_model
        for message in setting_warnings(training_args, of_model) if training_args.do_train else ():
            print(f"\nWarning: {message}")
        sys.stdout.flush()


def _mean_length(settings: Settings) -> int | None:
    """Return the mean length to estimate the memory for; raise an `InputError` if completions can't have it."""
    mean, limit = settings.script.dry_run_mean_length, settings.training.max_completion_length
    if mean is not None and not 1 <= mean <= (limit or mean):
        raise InputError(
            f"`dry_run_mean_length` is {mean}, but completions have 1 to {limit} tokens (`max_completion_length`): "
            "set it to a number of these, or leave it out."
        )
    return mean


def _adapter(settings: Settings, parts: Parts) -> Any:
    """Return the configuration of the adapter that is trained, if one is."""
    if len(parts) == 1:
        return get_peft_config(settings.model)
    from peft import PeftConfig

    adapter, revision = parts[0]
    return PeftConfig.from_pretrained(adapter, revision=revision)


def _check_as_the_trainer(settings: Settings, inputs: Inputs, problems: list[Exception]) -> None:
    """Add to the problems what TRL and transformers reject when a trainer is made and when training begins."""
    _, args, model_args, _ = settings
    name, revision = inputs.parts[-1]
    config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=args.trust_remote_code)
    is_adapter, weights, functions = len(inputs.parts) > 1, args.reward_weights, inputs.reward_funcs
    rejected = {
        f"`reward_weights` is {weights}, for {len(functions)} reward functions: give a number for each.":
            weights is not None and len(weights) != len(functions),
        f"`use_peft` asks for a new adapter, but {model_args.model_name_or_path} is one: leave `use_peft` out to "
        "train it on, or merge it first (--do_train false --merge_adapter true).":
            model_args.use_peft and is_adapter,
        "`sync_ref_model` is true, but there is no reference model: set `beta` above 0 and train no adapter, or leave "
        "`sync_ref_model` out.":
            args.sync_ref_model and (args.beta == 0 or model_args.use_peft or is_adapter),
        "`save_strategy` is 'best', but `metric_for_best_model` is not set: set it, e.g. reward.":
            args.save_strategy == "best" and args.metric_for_best_model is None,
    }  # fmt: skip
    problems += [InputError(message) for message, is_rejected in rejected.items() if is_rejected]
    with _collecting(problems):
        if inputs.data.train is not None and args.do_eval:
            check_fit(config, inputs.processing_class, args, [("eval", inputs.data.test)])
    for tracker in args.report_to:
        with _collecting(problems, f"`report_to` is '{tracker}': "):
            get_reporting_integration_callbacks([tracker])[0]()
    with _collecting(problems, f"`attn_implementation` is '{model_args.attn_implementation}': "), torch.device("meta"):
        if model_args.attn_implementation is not None:
            AutoModelForCausalLM.from_config(config, attn_implementation=model_args.attn_implementation)
    if not args.do_train:
        return
    with _collecting(problems, f"`optim` is '{args.optim}': "):
        Trainer.get_optimizer_cls_and_kwargs(args, torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    with _collecting(problems, "`push_to_hub` is set, but the Hub cannot be pushed to: "):
        if args.push_to_hub:
            whoami(args.hub_token)
    folder = Path(args.output_dir).absolute()
    above = next(path for path in (folder, *folder.parents) if path.exists())
    if not (above.is_dir() and os.access(above, os.W_OK)):
        problems.append(
            InputError(f"`output_dir` is {args.output_dir}, but {above} is no folder that can be written to.")
        )


@contextmanager
def _collecting(problems: list[Exception], setting: str = "") -> Iterator[None]:
    """
    Add an error that the block raises to the problems, and continue after the block.

    With `setting`, the first words of the message, other errors of a library are added too.
    """
    try:
        yield
    except (HfHubHTTPError, ImportError, OSError, RuntimeError, ValueError) as error:
        if setting:
            problems.append(InputError(f"{setting}{str(error).splitlines()[0]}"))
        elif isinstance(error, InputError | OSError):
            problems.append(error)
        else:
            raise


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
