"""What a run would do: its sample counts, its prompts, and the rewards of an example completion."""

import asyncio
import inspect
import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from datasets import Dataset
from torch import nn
from transformers import AutoConfig, AutoProcessor, PreTrainedModel, TrainerState

from ..bapo_config import BAPOConfig
from ..batch.staleness import max_staleness_in_words, mean_staleness
from ..errors import InputError
from ..evaluation.answers import gold_answers
from ..inputs.checks import check_tokenizer, has_rotary_positions, token_limits
from ..inputs.prompt_checks import TokenLimits, stored_prompts
from ..inputs.reward_checks import rewards_defect
from .memory import GIB, MemoryPlan, Sharding, plan_memory


SAMPLED_PROMPTS = 1000
"""Prompts that are tokenized, evenly over those that there are, and the longest text; of a stream, the first ones."""

TEXT_FOR_CHAT = "plain text, though the model has a chat template: `--prompt_column prompt` makes messages of it"

_QUANTILES = (0.05, 0.5, 0.95, 1.0)


@dataclass(frozen=True)
class Prompts:
    """The prompts of a run as its model gets them."""

    first: str  # after the chat template
    lacks_messages: bool  # text, though the model has a chat template
    num_prompts: int | None  # `None` for a stream
    num_sampled: int
    lengths: dict[float, int]  # tokens of a prompt, by quantile
    longest_row: int
    too_long: int  # of those looked at
    room: int | None  # longest prompt that leaves room for a completion; `None` for a model without a window


@dataclass(frozen=True)
class Reward:
    """What a reward function gave to a made completion."""

    name: str
    completion: str
    value: float | None = None  # `None` if it gave none
    error: str | None = None  # what it raised, or what is wrong with what it returned


def look_at_prompts(dataset: Any, processing_class: Any, room: int | None, template_kwargs: Any = None) -> Prompts:
    """Tokenize prompts as the trainer does, `template_kwargs` for the chat template; `room` is of [`Prompts`]."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if isinstance(dataset, Dataset):
        num_prompts = len(dataset)
        stored = stored_prompts(dataset) if num_prompts > SAMPLED_PROMPTS else ()
        sizes = [len(str(prompt)) for prompt in stored]
        longest = [max(range(num_prompts), key=sizes.__getitem__)] if sizes else []
        rows = sorted({*range(0, num_prompts, math.ceil(num_prompts / SAMPLED_PROMPTS)), *longest})
        prompts = dataset.select(rows)["prompt"][:]
    else:
        prompts, num_prompts = [row["prompt"] for row in islice(dataset, SAMPLED_PROMPTS)], None
        rows = list(range(len(prompts)))
    token_ids = [_tokens(prompt, tokenizer, template_kwargs or {}) for prompt in prompts]
    by_length = sorted(zip(map(len, token_ids), rows, strict=True))
    lengths = [length for length, _ in by_length]
    return Prompts(
        first=tokenizer.decode(token_ids[0]),
        lacks_messages=isinstance(prompts[0], str) and getattr(tokenizer, "chat_template", None) is not None,
        num_prompts=num_prompts,
        num_sampled=len(lengths),
        lengths={share: lengths[math.ceil(share * len(lengths)) - 1] for share in _QUANTILES},
        longest_row=by_length[-1][1],
        too_long=0 if room is None else sum(length > room for length in lengths),
        room=room,
    )


def check_fit(config: Any, processing_class: Any, args: BAPOConfig, datasets: Iterable[tuple[str, Any]]) -> None:
    """
    Reject a tokenizer with more tokens than the model, and prompts that are too long for it (`InputError`).

    `datasets` has pairs of name and dataset, or name and the dataset's [`Prompts`]; streams pass. A model with rotary
    positions works beyond the window that it was trained for, but ever worse: for it, this only warns.
    """
    config = config.get_text_config()
    limits = token_limits(config, args.max_completion_length)
    check_tokenizer(getattr(processing_class, "tokenizer", processing_class), limits.vocabulary)
    if limits.longest_prompt is None or hasattr(processing_class, "tokenizer"):  # a processor: images take tokens too
        return
    try:
        _check_window(datasets, processing_class, limits, args.chat_template_kwargs)
    except InputError as rejection:
        if not has_rotary_positions(config):
            raise
        warnings.warn(str(rejection), stacklevel=2)


def _check_window(
    datasets: Iterable[tuple[str, Any]], processing_class: Any, limits: TokenLimits, template_kwargs: Any
) -> None:
    if limits.longest_prompt <= 0:
        raise InputError(
            f"`max_completion_length` is {limits.completion}, but the model's window (`max_position_embeddings`) "
            f"is {limits.window} with the prompt: lower `max_completion_length`."
        )
    for name, found in datasets:
        if isinstance(found, Dataset) and len(found):
            found = look_at_prompts(found, processing_class, limits.longest_prompt, template_kwargs)
        if isinstance(found, Prompts) and found.too_long:
            of_them = "" if found.num_sampled == found.num_prompts else "that were looked at "
            raise InputError(
                f"{found.too_long} of the {found.num_sampled} prompts of the {name} dataset {of_them}are too long: "
                f"the longest, row {found.longest_row}, has {found.lengths[1.0]} tokens, {limits.why_too_long}"
            )


def _tokens(prompt: Any, tokenizer: Any, template_kwargs: Mapping[str, Any]) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False, **template_kwargs)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


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
        sharding ([`~bapo_trl.plan.memory.Sharding`], *optional*): How the model is divided over the processes; by
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
    room = token_limits(config.get_text_config(), args.max_completion_length).longest_prompt
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


def aligned_rows(rows: Iterable[tuple[str, str]]) -> str:
    """Return names and values as lines, the values one below the other."""
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


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
