"""What a dry run found, and how it reads on a terminal."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..advice import Advice, oldest_age
from ..bapo_config import BAPOConfig
from .counts import Counts, mean_age, updates_per_generation
from .memory import ENGINES, Layout, Memory
from .samples import Prompts, Reward
from .shape import Shape


_PROMPT_CHARACTERS = 400


@dataclass(frozen=True)
class DryRun:
    """
    What is known of a run before it begins. `print` it.

    Attributes:
        args ([`BAPOConfig`]): Its settings.
        layout ([`~memory.Layout`]): Where it trains.
        counts (`list[Counts]`): Its arithmetic, on its own number of processes first; empty for an evaluation alone.
        advice ([`~advice.Advice`]): The row of the advice for samples as old as its own get.
        shape ([`~shape.Shape`]): Sizes of the model.
        memory ([`~memory.Memory`]): What lies on one GPU before the first activation.
        prompts ([`~samples.Prompts`]): The prompts, as the model gets them.
        rewards (`list[Reward]`): What each reward function gives to a made completion.
    """

    args: BAPOConfig
    layout: Layout
    counts: list[Counts]
    advice: Advice
    shape: Shape
    memory: Memory
    prompts: Prompts
    rewards: list[Reward]

    def __str__(self) -> str:
        first = [_counts(self), _ages(self)] if self.counts else [_evaluation(self)]
        return "\n\n".join(part for part in (*first, _prompts(self), _rewards(self), _memory(self)) if part)


def _counts(run: DryRun) -> str:
    names = {1: "1 process"}
    rows = [
        ("prompts a generation", [f"{each.prompts:g}" for each in run.counts]),
        ("samples a generation", [str(each.samples) for each in run.counts]),
        ("samples an update", [str(each.samples_per_update) for each in run.counts]),
        ("generations an epoch", [_or_dash(each.generations_per_epoch) for each in run.counts]),
        ("updates an epoch", [_or_dash(each.updates_per_epoch) for each in run.counts]),
    ]
    header = [names.get(each.processes, f"{each.processes} processes") for each in run.counts]
    header[0] += " *"
    lines = [_table("Arithmetic (* as launched)", header, rows)]
    lines += [f"  Refused on {each.processes}: {each.refusal}." for each in run.counts if each.refusal]
    return "\n".join(lines)


def _ages(run: DryRun) -> str:
    args = run.args
    age, held_by = oldest_age(args)
    mean = f"{mean_age(args):g}"
    if held_by:
        mean += f" of fresh ones; others older{held_by}"
    rows = [
        ("micro-batches an update", [str(args.gradient_accumulation_steps)]),
        ("updates a generation", [f"{updates_per_generation(args):g}"]),
        ("oldest sample, policy versions", [("no limit" if age == math.inf else f"{age:g}") + held_by]),
        ("mean age of a sample", [mean]),
    ]
    return "\n".join([_table("Staleness, on any number of processes", [""], rows), f"  {run.advice.line(args)}"])


def _evaluation(run: DryRun) -> str:
    args = run.args
    completions = args.num_generations_eval or args.num_generations
    total = "-" if run.prompts.num_prompts is None else str(run.prompts.num_prompts * completions)
    rows = [
        ("prompts", [_or_dash(run.prompts.num_prompts)]),
        ("completions a prompt", [str(completions)]),
        ("completions", [total]),
        ("completions at once, a process", [str(args.per_device_eval_batch_size)]),
    ]
    return _table("Evaluation alone: nothing is trained", [""], rows)


def _prompts(run: DryRun) -> str:
    prompts = run.prompts
    names = {0.5: "median", 1.0: "longest"}
    shares = ", ".join(f"{length} ({names.get(q, f'{q:.0%}')})" for q, length in prompts.lengths.items())
    of = "" if prompts.num_prompts == prompts.looked_at else f" ({prompts.looked_at} of them looked at)"
    count = "a stream" if prompts.num_prompts is None else f"{prompts.num_prompts} prompts"
    lines = [f"Prompts: {count}{of}", f"  tokens: {shares}"]
    if prompts.room is not None:
        completion = run.args.max_completion_length
        lines.append(f"  room before a completion of {completion}: {prompts.room}; too long: {prompts.too_long}")
    shown = prompts.first[:_PROMPT_CHARACTERS]
    more = " ..." if len(prompts.first) > len(shown) else ""
    lines += ["  the first, as the model gets it:", *(f"  | {line}" for line in f"{shown}{more}".splitlines())]
    return "\n".join(lines)


def _rewards(run: DryRun) -> str:
    if not run.rewards:
        return ""
    lines = [f'Rewards of a made completion, "{run.rewards[0].completion}"']
    lines += [
        f"  {each.name}: {each.error or ('none' if each.value is None else f'{each.value:g}')}" for each in run.rewards
    ]
    return "\n".join(lines)


def _memory(run: DryRun) -> str:
    args, shape, layout = run.args, run.shape, run.layout
    optimizer = run.memory.optimizer
    rows: list[tuple[str, list[str]]] = [("weights", [_gigabytes(run.memory.weights)])]
    if run.counts:
        rows += [
            ("gradients", [_gigabytes(run.memory.gradients)]),
            ("optimizer", ["not known" if optimizer is None else _gigabytes(optimizer)]),
            ("reference model (beta)", [_gigabytes(run.memory.reference)]),
            ("together", [_gigabytes(run.memory.total)]),
            ("logits of a micro-batch, if held whole", [_gigabytes(_logits(run))]),
        ]
    if shape.cache_numbers:
        length = run.prompts.lengths[1.0] + (args.max_completion_length or 0)
        cache = 2 * shape.cache_numbers * length
        rows.append((f"sampler: cache of one sample of {length} tokens", [_gigabytes(cache)]))
    rows.append(("sampler: weights in bfloat16, all GPUs", [_gigabytes(2 * shape.parameters)]))
    number = f"{layout.processes} process{'es' if layout.processes != 1 else ''}, {ENGINES[layout.engine]}"
    if layout.offloaded:
        number += f", {' and '.join(sorted(layout.offloaded))} in CPU memory"
    trained = "" if shape.trained == shape.parameters else f", {_count(shape.trained)} of them trained"
    title = f"GB on a GPU: {number}; {_count(shape.parameters)} parameters{trained}"
    return "\n".join([_table(title, [""], rows), "  Activations are not counted, nor what a framework reserves."])


def _logits(run: DryRun) -> float:
    vocabulary = getattr(run.shape.config, "vocab_size", 0)
    return 4.0 * run.args.per_device_train_batch_size * (run.args.max_completion_length or 0) * vocabulary


def _table(title: str, header: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    name_width = max(len(name) for name, _ in rows)
    widths = [max(len(header[c]), *(len(cells[c]) for _, cells in rows)) for c in range(len(header))]
    single = len(header) == 1

    def line(name: str, cells: Sequence[str]) -> str:
        aligned = (cell if single else cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        return f"  {name:<{name_width}}  {'  '.join(aligned)}".rstrip()

    head = [] if single else [line("", header)]
    return "\n".join([title, *head, *(line(name, cells) for name, cells in rows)])


def _gigabytes(value: float) -> str:
    return f"{value / 1e9:.3g}"


def _count(number: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def _or_dash(value: Any) -> str:
    return "-" if value is None else f"{value:g}"
