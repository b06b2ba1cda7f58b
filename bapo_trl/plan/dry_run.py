"""What a run would do, by its settings, its prompts and the configuration of its model."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from datasets import Dataset
from transformers import AutoConfig, AutoProcessor, PreTrainedModel

from ..bapo_config import BAPOConfig
from ..batch.staleness import mean_age, oldest_age
from ..inputs.advice import advice_line
from ..inputs.checks import token_limits
from .samples import TEXT_FOR_CHAT, Prompts, Reward, check_fit, look_at_prompts, try_rewards


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
    refusal: str | None  # why no run with that many processes is possible


def count(args: BAPOConfig, processes: int, num_prompts: int | None) -> Counts:
    """Return the numbers of a run on so many processes and prompts; `None` for a stream."""
    micro_batch = args.per_device_train_batch_size * processes
    samples = args.generation_batch_size if args.has_fixed_samples else args.steps_per_generation * micro_batch
    updates = samples / micro_batch * args.num_iterations / args.gradient_accumulation_steps
    prompts = samples / args.num_generations
    generations = None if num_prompts is None else int(num_prompts // prompts)
    too_few = f"a generation takes {prompts:g} prompts, there are {num_prompts}"
    return Counts(
        processes=processes,
        prompts=prompts,
        samples=samples,
        samples_per_update=micro_batch * args.gradient_accumulation_steps,
        updates_per_generation=updates,
        generations_per_epoch=generations,
        updates_per_epoch=None if generations is None else generations * updates,
        refusal=too_few if generations == 0 else None,
    )


@dataclass(frozen=True)
class DryRun:
    """What is known of a run before it begins. `print` it."""

    args: BAPOConfig
    counts: list[Counts]  # on its own number of processes first; empty for an evaluation alone
    num_prompts: int | None  # `None` for a stream
    prompts: Prompts | None = None  # `None` without data or a tokenizer
    rewards: Sequence[Reward] = ()

    @property
    def problems(self) -> list[str]:
        """What the run would stop at, each in a sentence."""
        refusals = [f"On {_processes(each)}, {each.refusal}." for each in self.counts[:1] if each.refusal]
        return refusals + [
            f'The reward function `{each.name}` {each.error} (given the first prompt and "{each.completion}").'
            for each in self.rewards
            if each.error
        ]

    def tables(self) -> str:
        """Return all but the problems."""
        parts = [_counts(self), _staleness(self)] if self.counts else [_evaluation(self)]
        if self.prompts is None:
            parts.append("Prompts and rewards are not known: the end says why.")
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
) -> DryRun:
    """
    Return what can be known of a run before it begins. Nothing is written, and no weight is loaded.

    What TRL's trainer refuses when it is made, it does not see: it makes none.

    Args:
        args ([`BAPOConfig`]): Settings of the run.
        model (`str` or [`~transformers.PreTrainedModel`]): Model to train, as [`BAPOTrainer`] takes it.
        reward_funcs (`RewardFunc` or `list[RewardFunc]`): Reward functions, as [`BAPOTrainer`] takes them. Each is
            called once.
        train_dataset (`Dataset` or `IterableDataset`): Prompts to train on; with `do_train` false, to evaluate on.
        processing_class ([`~transformers.PreTrainedTokenizerBase`] or [`~transformers.ProcessorMixin`], *optional*):
            Tokenizer; by default the model's.
        processes (`int`, *optional*): Processes that train; by default those of this process' launcher.

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
    else:
        name, settings, config = model.config._name_or_path, {}, model.config
    processing_class = processing_class or AutoProcessor.from_pretrained(name, **settings)
    check_fit(config, processing_class, args, [("train", train_dataset)])
    room = token_limits(config.get_text_config(), args.max_completion_length).longest_prompt
    functions = reward_funcs if isinstance(reward_funcs, Sequence) else [reward_funcs]
    return replace(
        arithmetic_of(args, train_dataset, processes),
        prompts=look_at_prompts(train_dataset, processing_class, room, args.chat_template_kwargs),
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


def aligned_rows(rows: Iterable[tuple[str, str]]) -> str:
    """Return names and values as lines, the values one below the other."""
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def _counts(run: DryRun) -> str:
    cells = {
        "": [f"{_processes(each)}{' *' if each is run.counts[0] else ''}" for each in run.counts],
        "prompts a generation": [f"{each.prompts:g}" for each in run.counts],
        "samples a generation": [str(each.samples) for each in run.counts],
        "samples an update": [str(each.samples_per_update) for each in run.counts],
        "updates a generation": [f"{each.updates_per_generation:g}" for each in run.counts],
        "generations an epoch": [_or_dash(each.generations_per_epoch) for each in run.counts],
        "updates an epoch": [_or_dash(each.updates_per_epoch) for each in run.counts],
    }
    if not run.args.has_fixed_samples:  # else the same on any number of processes
        del cells["updates a generation"]
    widths = [max(map(len, column)) for column in zip(*cells.values(), strict=True)]
    rows = [
        (name, "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
        for name, row in cells.items()
    ]
    refused = [f"  Refused on {each.processes}: {each.refusal}." for each in run.counts if each.refusal]
    return "\n".join(["Arithmetic (* as launched)", aligned_rows(rows), *refused])


def _staleness(run: DryRun) -> str:
    args, here = run.args, run.counts[0]
    mean = f"{mean_age(args):g} policy versions"
    if args.uses_replay or args.uses_partial_rollouts:
        mean += " of fresh ones; of all not known before the run"
    rows = [
        ("micro-batches an update", str(args.gradient_accumulation_steps)),
        ("updates a generation", f"{here.updates_per_generation:g}"),
        ("oldest age of a sample", oldest_age(args)),
        ("mean age of a sample", mean),
    ]
    where = _processes(here) if args.has_fixed_samples else "any number of processes"
    return f"Staleness, on {where}\n{aligned_rows(rows)}\n  {advice_line(args)}".rstrip()


def _evaluation(run: DryRun) -> str:
    completions, num_prompts = run.args.num_generations_eval or run.args.num_generations, run.num_prompts
    rows = [
        ("prompts", _or_dash(num_prompts)),
        ("completions a prompt", str(completions)),
        ("completions", "-" if num_prompts is None else str(num_prompts * completions)),
        ("completions at once, a process", str(run.args.per_device_eval_batch_size)),
    ]
    return f"Evaluation alone: nothing is trained\n{aligned_rows(rows)}"


def _prompts(args: BAPOConfig, prompts: Prompts) -> str:
    names = {0.5: "median", 1.0: "longest"}
    shares = ", ".join(f"{length} ({names.get(q, f'{q:.0%}')})" for q, length in prompts.lengths.items())
    of = "" if prompts.num_prompts == prompts.num_sampled else f" ({prompts.num_sampled} of them looked at)"
    count = "a stream" if prompts.num_prompts is None else f"{prompts.num_prompts} prompts"
    lines = [f"Prompts: {count}{of}", f"  tokens: {shares}"]
    if prompts.room is not None:
        completion = args.max_completion_length
        room = str(prompts.room)
        if prompts.room <= 0:
            room = f"none, it does not fit into the window of {prompts.room + completion}"
        lines.append(f"  room before a completion of {completion}: {room}; too long: {prompts.too_long}")
    if prompts.lacks_messages:
        lines.append(f"  {TEXT_FOR_CHAT}")
    shown = prompts.first[:_PROMPT_CHARACTERS]
    more = " ..." if len(prompts.first) > len(shown) else ""
    lines += ["  the first, as the model gets it:", *(f"  | {line}" for line in f"{shown}{more}".splitlines())]
    return "\n".join(lines)


def _rewards(rewards: Sequence[Reward]) -> str:
    if not rewards:
        return ""
    lines = [f'Rewards of a made completion, "{rewards[0].completion}"']
    for each in rewards:
        value = "failed" if each.error else "none" if each.value is None else f"{each.value:g}"
        lines.append(f"  {each.name}: {value}")
    return "\n".join(lines)


def _processes(counts: Counts) -> str:
    return f"{counts.processes} process{'es' if counts.processes != 1 else ''}"


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
