"""What a dry run found, and how it reads on a terminal."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..advice import Advice, oldest_age
from ..bapo_config import BAPOConfig
from .counts import Counts, mean_age
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
        num_prompts (`int`, *optional*): Prompts that there are; `None` for a stream.
        shape ([`~shape.Shape`], *optional*): Sizes of the model; `None` for one that is not there yet.
        memory ([`~memory.Memory`], *optional*): What lies on one GPU before the first activation.
        prompts ([`~samples.Prompts`], *optional*): The prompts, as the model gets them.
        rewards (`list[Reward]`): What each reward function gives to a made completion.
    """

    args: BAPOConfig
    layout: Layout
    counts: list[Counts]
    advice: Advice
    num_prompts: int | None
    shape: Shape | None = None
    memory: Memory | None = None
    prompts: Prompts | None = None
    rewards: Sequence[Reward] = ()

    def __str__(self) -> str:
        first = [_counts(self), _ages(self)] if self.counts else [_evaluation(self)]
        if self.prompts is None or self.memory is None or self.shape is None:
            rest = ["The model is not built yet: its prompts, rewards and memory are not known before it is."]
        else:
            rest = [_prompts(self, self.prompts), _rewards(self), _memory(self, self.memory, self.shape, self.prompts)]
        return "\n\n".join(part for part in (*first, *rest) if part)


def _counts(run: DryRun) -> str:
    fixed = run.args.has_fixed_samples
    rows = [
        ("prompts a generation", [f"{each.prompts:g}" for each in run.counts]),
        ("samples a generation", [str(each.samples) for each in run.counts]),
        ("samples an update", [str(each.samples_per_update) for each in run.counts]),
        *([("updates a generation", [f"{each.updates_per_generation:g}" for each in run.counts])] if fixed else []),
        ("generations an epoch", [_or_dash(each.generations_per_epoch) for each in run.counts]),
        ("updates an epoch", [_or_dash(each.updates_per_epoch) for each in run.counts]),
    ]
    header = [_processes(each.processes) for each in run.counts]
    header[0] += " *"
    lines = [_table("Arithmetic (* as launched)", header, rows)]
    lines += [f"  Refused on {each.processes}: {each.refusal}." for each in run.counts if each.refusal]
    return "\n".join(lines)


def _ages(run: DryRun) -> str:
    args, here = run.args, run.counts[0]
    age, held_by = oldest_age(args)
    mean = f"{mean_age(args):g}"
    if held_by:
        mean += f" of fresh ones; of all not known before the run{held_by}"
    rows = [
        ("micro-batches an update", [str(args.gradient_accumulation_steps)]),
        ("updates a generation", [f"{here.updates_per_generation:g}"]),
        ("oldest sample, policy versions", [("no limit" if age == math.inf else f"{age:g}") + held_by]),
        ("mean age of a sample", [mean]),
    ]
    where = _processes(here.processes) if args.has_fixed_samples else "any number of processes"
    return "\n".join([_table(f"Staleness, on {where}", [""], rows), f"  {run.advice.line(args)}"])


def _evaluation(run: DryRun) -> str:
    args = run.args
    completions = args.num_generations_eval or args.num_generations
    total = "-" if run.num_prompts is None else str(run.num_prompts * completions)
    rows = [
        ("prompts", [_or_dash(run.num_prompts)]),
        ("completions a prompt", [str(completions)]),
        ("completions", [total]),
        ("completions at once, a process", [str(args.per_device_eval_batch_size)]),
    ]
    return _table("Evaluation alone: nothing is trained", [""], rows)


def _prompts(run: DryRun, prompts: Prompts) -> str:
    names = {0.5: "median", 1.0: "longest"}
    shares = ", ".join(f"{length} ({names.get(q, f'{q:.0%}')})" for q, length in prompts.lengths.items())
    of = "" if prompts.num_prompts == prompts.looked_at else f" ({prompts.looked_at} of them looked at)"
    count = "a stream" if prompts.num_prompts is None else f"{prompts.num_prompts} prompts"
    lines = [f"Prompts: {count}{of}", f"  tokens: {shares}"]
    if prompts.room is not None:
        completion = run.args.max_completion_length
        room = str(prompts.room)
        if prompts.room <= 0:
            room = f"none, it does not fit into the window of {prompts.room + (completion or 0)}"
        lines.append(f"  room before a completion of {completion}: {room}; too long: {prompts.too_long}")
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


def _memory(run: DryRun, memory: Memory, shape: Shape, prompts: Prompts) -> str:
    args, layout = run.args, run.layout
    is_quantized = memory.weights is None
    rows: list[tuple[str, list[str]]] = [("weights", [_gigabytes(memory.weights) + " (quantized)" * is_quantized])]
    parts = (memory.weights, memory.gradients, memory.optimizer, memory.reference)
    if run.counts:
        rows += [
            ("gradients", [_gigabytes(memory.gradients)]),
            ("optimizer", [_gigabytes(memory.optimizer)]),
            ("reference model (beta)", [_gigabytes(memory.reference)]),
            ("together", [_gigabytes(memory.total) + (" and what is not known" if None in parts else "")]),
            ("logits of a micro-batch, if held whole", [_gigabytes(_logits(run, shape))]),
        ]
    if shape.cache_numbers:
        length = prompts.lengths[1.0] + (args.max_completion_length or 0)
        cache = 2 * shape.cache_numbers * length
        rows.append((f"sampler: cache of one sample of {length} tokens", [_gigabytes(cache)]))
    rows.append(("sampler: weights in bfloat16, all GPUs", [_gigabytes(2 * shape.parameters)]))
    number = f"{_processes(layout.processes)}, {ENGINES[layout.engine]}"
    if layout.offloaded:
        number += f", {' and '.join(sorted(layout.offloaded))} in CPU memory"
    trained = "" if shape.trained == shape.parameters else f", {_count(shape.trained)} of them trained"
    title = f"GB on a GPU: {number}; {_count(shape.parameters)} parameters{trained}"
    return "\n".join([_table(title, [""], rows), "  Activations are not counted, nor what a framework reserves."])


def _logits(run: DryRun, shape: Shape) -> float:
    vocabulary = getattr(shape.config, "vocab_size", 0)
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


def _gigabytes(value: float | None) -> str:
    if value is None:
        return "not known"
    return f"{value / 1e6:.3g} MB" if 0 < value < 1e7 else f"{value / 1e9:.3g}"


def _processes(number: int) -> str:
    return f"{number} process{'es' if number != 1 else ''}"


def _count(number: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def _or_dash(value: Any) -> str:
    return "-" if value is None else f"{value:g}"
