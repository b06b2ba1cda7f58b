"""What a run would do, by its settings, its prompts and the configuration of its model."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from datasets import Dataset
from transformers import AutoProcessor, PreTrainedModel

from ..advice import advice_line
from ..bapo_config import BAPOConfig
from ..batch.staleness import mean_age, oldest_age
from ..errors import InputError
from ..inputs.checks import check_tokenizer, has_rotary_positions, token_limits
from .counts import Counts, count
from .empty_model import empty_model
from .samples import TEXT_FOR_CHAT, Prompts, Reward, check_window, look_at_prompts, try_rewards


_SCALES = (1, 8, 32)  # processes whose arithmetic is shown beside that of the run
_PROMPT_CHARACTERS = 400


@dataclass(frozen=True)
class DryRun:
    """What is known of a run before it begins. `print` it."""

    args: BAPOConfig
    processes: int
    counts: list[Counts]  # on its own number of processes first; empty for an evaluation alone
    num_prompts: int | None  # `None` for a stream
    model_config: Any = None  # of its text model; this and what follows: `None` for a model that is not there yet
    prompts: Prompts | None = None
    rewards: Sequence[Reward] = ()
    missing: str = "The model is not built yet: its prompts and rewards are not known before it is."

    @property
    def problems(self) -> list[str]:
        """What the run would stop at, each in a sentence."""
        refusals = [each.refusal for each in self.counts[:1] if each.refusal]
        return [f"On {_processes(self.processes)}, {refusal}." for refusal in refusals] + [
            f'The reward function `{each.name}` {each.error} (given the first prompt and "{each.completion}").'
            for each in self.rewards
            if each.error
        ]

    def tables(self) -> str:
        """Return all but the problems."""
        first = [_counts(self), _ages(self)] if self.counts else [_evaluation(self)]
        rest = [self.missing] if self.prompts is None else [_prompts(self, self.prompts), _rewards(self)]
        return "\n\n".join(part for part in (*first, *rest) if part)

    def __str__(self) -> str:
        lines = [f"\n\nThe run would stop: {problem}" for problem in self.problems]
        return "".join([self.tables(), *lines])


def dry_run(
    args: BAPOConfig,
    model: str | PreTrainedModel | None,
    reward_funcs: Any = None,
    train_dataset: Any = None,
    processing_class: Any = None,
    processes: int | None = None,
    trains_adapter: bool = False,
) -> DryRun:
    """
    Return what can be known of a run before it begins. Nothing is written, and no weight is loaded.

    What TRL's trainer refuses when it is made, it does not see: it makes none.

    Args:
        args ([`BAPOConfig`]): Settings of the run.
        model (`str` or [`~transformers.PreTrainedModel`], *optional*): Model to train, as [`BAPOTrainer`] takes it.
            `None` for one that is not there yet: what depends on it is left out.
        reward_funcs (`RewardFunc` or `list[RewardFunc]`, *optional*): Reward functions, as [`BAPOTrainer`] takes them.
            Each is called once.
        train_dataset (`Dataset` or `IterableDataset`): Prompts to train on; with `do_train` false, to evaluate on.
        processing_class ([`~transformers.PreTrainedTokenizerBase`] or [`~transformers.ProcessorMixin`], *optional*):
            Tokenizer; by default the model's.
        processes (`int`, *optional*): Processes that train; by default those of this process' launcher.
        trains_adapter (`bool`, *optional*, defaults to `False`): Whether an adapter is trained.

    Raises:
        ValueError: Without prompts, for a model that cannot be found or built by its name, and for values, weights of
            rewards, tokenizers and prompts that TRL or the model would fail at. A reward function that fails is among
            the `problems` of what is returned.

    Example:

    ```python
    print(dry_run(args, "Qwen/Qwen2.5-0.5B-Instruct", reward, train_dataset=dataset))
    ```
    """
    if train_dataset is None:
        raise InputError("`train_dataset` is None: give the prompts.")
    functions = reward_funcs if isinstance(reward_funcs, Sequence) else [reward_funcs] if reward_funcs else []
    _check_reward_weights(args, functions)
    _check_combinations(args, trains_adapter)
    arithmetic = arithmetic_of(args, train_dataset, processes)
    if model is None:
        return arithmetic
    name = model if isinstance(model, str) else model.config._name_or_path
    if isinstance(model, str):
        init = args.model_init_kwargs if isinstance(args.model_init_kwargs, dict) else {}
        try:
            attention = init.get("attn_implementation")
            model = empty_model(model, init.get("revision"), args.trust_remote_code, attention)
        except (ImportError, OSError, ValueError) as error:
            raise InputError(
                f"`model` is '{name}', and no model can be built by its configuration: {str(error).splitlines()[0]}"
            ) from error
    if processing_class is None:
        processing_class = AutoProcessor.from_pretrained(name, trust_remote_code=args.trust_remote_code)
    config = model.config.get_text_config()
    limits = token_limits(config, args.max_completion_length)
    check_tokenizer(getattr(processing_class, "tokenizer", processing_class), limits.vocabulary)
    if not has_rotary_positions(config):
        check_window([("train", train_dataset)], processing_class, limits, args.chat_template_kwargs)
    prompts = look_at_prompts(train_dataset, processing_class, limits.longest_prompt, args.chat_template_kwargs)
    return replace(
        arithmetic,
        model_config=config,
        prompts=prompts,
        rewards=try_rewards(functions, next(iter(train_dataset)), processing_class),
    )


def arithmetic_of(args: BAPOConfig, train_dataset: Any, processes: int | None = None) -> DryRun:
    """Return what the settings and the number of prompts tell, as in [`dry_run`]; `None` for data that lacks."""
    processes = processes or processes_of_launcher()
    num_prompts = len(train_dataset) if isinstance(train_dataset, Dataset) else None
    scales = dict.fromkeys((processes, *_SCALES)) if args.do_train or not args.do_eval else ()
    return DryRun(args, processes, [count(args, scale, num_prompts) for scale in scales], num_prompts)


def processes_of_launcher() -> int:
    """Return the number of processes of the launcher that started this one."""
    return int(os.environ.get("WORLD_SIZE", 1))


def _check_reward_weights(args: BAPOConfig, functions: Sequence[Any]) -> None:
    weights = args.reward_weights
    if weights is not None and functions and len(weights) != len(functions):
        raise InputError(
            f"`reward_weights` is {weights}, for {len(functions)} reward functions: give a number for each."
        )


def _check_combinations(args: BAPOConfig, trains_adapter: bool) -> None:
    """Refuse settings that TRL and transformers refuse together, when a trainer is made (`InputError`)."""
    if args.sync_ref_model and (args.beta == 0 or trains_adapter):
        raise InputError(
            "`sync_ref_model` is true, but there is no reference model to update: set `beta` above 0 and train no "
            "adapter, or leave `sync_ref_model` out."
        )
    if args.save_strategy == "best" and args.metric_for_best_model is None:
        raise InputError("`save_strategy` is 'best', but `metric_for_best_model` is not set: set it, e.g. reward.")


def aligned_rows(rows: Iterable[tuple[str, str]]) -> str:
    """Return names and values as lines, the values one below the other."""
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def _counts(run: DryRun) -> str:
    fixed = run.args.has_fixed_samples
    names = (
        "", "prompts a generation", "samples a generation", "samples an update", *["updates a generation"] * fixed,
        "generations an epoch", "updates an epoch",
    )  # fmt: skip
    columns = [
        [
            f"{_processes(each.processes)}{' *' if place == 0 else ''}", f"{each.prompts:g}", str(each.samples),
            str(each.samples_per_update), *[f"{each.updates_per_generation:g}"] * fixed,
            _or_dash(each.generations_per_epoch), _or_dash(each.updates_per_epoch),
        ]
        for place, each in enumerate(run.counts)
    ]  # fmt: skip
    aligned = [[cell.rjust(max(map(len, column))) for cell in column] for column in columns]
    rows = zip(names, map("  ".join, zip(*aligned, strict=True)), strict=True)
    lines = ["Arithmetic (* as launched)", aligned_rows(rows)]
    lines += [f"  Refused on {each.processes}: {each.refusal}." for each in run.counts if each.refusal]
    return "\n".join(lines)


def _ages(run: DryRun) -> str:
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
    where = _processes(here.processes) if args.has_fixed_samples else "any number of processes"
    return f"Staleness, on {where}\n{aligned_rows(rows)}\n  {advice_line(args)}".rstrip()


def _evaluation(run: DryRun) -> str:
    args = run.args
    completions = args.num_generations_eval or args.num_generations
    total = "-" if run.num_prompts is None else str(run.num_prompts * completions)
    rows = [
        ("prompts", _or_dash(run.num_prompts)),
        ("completions a prompt", str(completions)),
        ("completions", total),
        ("completions at once, a process", str(args.per_device_eval_batch_size)),
    ]
    return f"Evaluation alone: nothing is trained\n{aligned_rows(rows)}"


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
    if prompts.lacks_messages:
        lines.append(f"  {TEXT_FOR_CHAT}")
    shown = prompts.first[:_PROMPT_CHARACTERS]
    more = " ..." if len(prompts.first) > len(shown) else ""
    lines += ["  the first, as the model gets it:", *(f"  | {line}" for line in f"{shown}{more}".splitlines())]
    return "\n".join(lines)


def _rewards(run: DryRun) -> str:
    if not run.rewards:
        return ""
    lines = [f'Rewards of a made completion, "{run.rewards[0].completion}"']
    lines += [
        f"  {each.name}: {'failed' if each.error else 'none' if each.value is None else f'{each.value:g}'}"
        for each in run.rewards
    ]
    return "\n".join(lines)


def _processes(number: int) -> str:
    return f"{number} process{'es' if number != 1 else ''}"


def _or_dash(value: Any) -> str:
    return "-" if value is None else f"{value:g}"
