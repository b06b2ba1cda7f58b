"""What the prompts of a run look like to its model, and what its reward functions say to a made completion."""

import asyncio
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

from datasets import Dataset
from torch import nn
from transformers import TrainerState

from ..bapo_config import BAPOConfig
from ..errors import InputError
from ..evaluation.answers import gold_answers
from ..inputs.checks import check_tokenizer, has_rotary_positions, token_limits
from ..inputs.prompt_checks import TokenLimits, stored_prompts
from ..inputs.reward_checks import rewards_defect


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
    Refuse a tokenizer with more tokens than the model, and prompts that are too long for it (`InputError`).

    `datasets` has pairs of name and dataset; streams pass. Rotary positions go on beyond the window that the model was
    trained for, worse and worse: there, this only warns.
    """
    config = config.get_text_config()
    limits = token_limits(config, args.max_completion_length)
    check_tokenizer(getattr(processing_class, "tokenizer", processing_class), limits.vocabulary)
    if limits.longest_prompt is None or hasattr(processing_class, "tokenizer"):  # a processor: images take tokens too
        return
    try:
        _check_window(datasets, processing_class, limits, args.chat_template_kwargs)
    except InputError as refusal:
        if not has_rotary_positions(config):
            raise
        warnings.warn(str(refusal), stacklevel=2)


def _check_window(
    datasets: Iterable[tuple[str, Any]], processing_class: Any, limits: TokenLimits, template_kwargs: Any
) -> None:
    if limits.longest_prompt <= 0:
        raise InputError(
            f"`max_completion_length` is {limits.completion}, but the model's window (`max_position_embeddings`) "
            f"is {limits.window} with the prompt: lower `max_completion_length`."
        )
    for name, dataset in datasets:
        if not (isinstance(dataset, Dataset) and len(dataset)):
            continue
        found = look_at_prompts(dataset, processing_class, limits.longest_prompt, template_kwargs)
        if found.too_long:
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
