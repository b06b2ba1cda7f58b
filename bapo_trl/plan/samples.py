"""What the prompts of a run look like to its model, and what its reward functions say to a made completion."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from datasets import Dataset
from torch import nn
from transformers import TrainerState

from ..evaluation.answers import gold_answers
from ..inputs.reward_checks import rewards_defect
from ..upstream.trl_compat import is_async_callable


LOOKED_AT = 1000
"""Prompts that are tokenized at most, evenly over those that there are; of a stream, the first."""

_QUANTILES = (0.05, 0.5, 0.95, 1.0)


@dataclass(frozen=True)
class Prompts:
    """
    The prompts of a run as its model gets them.

    Attributes:
        first (`str`): The first one, after the chat template.
        num_prompts (`int`, *optional*): Prompts that there are; `None` for a stream.
        looked_at (`int`): Those that were tokenized.
        lengths (`dict[float, int]`): Tokens of a prompt, by quantile.
        too_long (`int`): Those of them that leave no room for a completion of `max_completion_length`.
        room (`int`, *optional*): Longest prompt that leaves room; `None` for a model without a window.
    """

    first: str
    num_prompts: int | None
    looked_at: int
    lengths: dict[float, int]
    too_long: int
    room: int | None


@dataclass(frozen=True)
class Reward:
    """
    What a reward function gave to a made completion.

    Attributes:
        name (`str`): The function.
        completion (`str`): What it was shown.
        value (`float`, *optional*): Its reward, `None` if it gave none.
        error (`str`, *optional*): What it raised, or what is wrong with what it returned.
    """

    name: str
    completion: str
    value: float | None
    error: str | None


def look_at_prompts(dataset: Any, processing_class: Any, room: int | None, template_kwargs: Any = None) -> Prompts:
    """
    Tokenize prompts as the trainer does.

    Args:
        dataset (`Dataset` or `IterableDataset`): With a column `prompt`, text or messages.
        processing_class ([`~transformers.PreTrainedTokenizerBase`] or [`~transformers.ProcessorMixin`]): Tokenizer, or
            what holds it.
        room (`int`, *optional*): Tokens that a prompt may have.
        template_kwargs (mapping, *optional*): Arguments of the chat template.
    """
    if isinstance(dataset, Dataset):
        step = max(1, math.ceil(len(dataset) / LOOKED_AT))
        prompts = dataset.select(range(0, len(dataset), step))["prompt"][:]
        num_prompts = len(dataset)
    else:
        prompts, num_prompts = [row["prompt"] for row in islice(dataset, LOOKED_AT)], None
    token_ids = tokenize(processing_class, template_kwargs, prompts)
    lengths = sorted(map(len, token_ids))
    return Prompts(
        first=getattr(processing_class, "tokenizer", processing_class).decode(token_ids[0]),
        num_prompts=num_prompts,
        looked_at=len(lengths),
        lengths={share: lengths[math.ceil(share * len(lengths)) - 1] for share in _QUANTILES},
        too_long=0 if room is None else sum(length > room for length in lengths),
        room=room,
    )


def tokenize(processing_class: Any, template_kwargs: Any, prompts: Sequence[Any]) -> list[list[int]]:
    """
    Return the token ids of prompts as the model gets them.

    Args:
        processing_class ([`~transformers.PreTrainedTokenizerBase`] or [`~transformers.ProcessorMixin`]): Tokenizer, or
            what holds it.
        template_kwargs (mapping, *optional*): Arguments of the chat template.
        prompts (sequence of `str` or messages): The prompts.
    """
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    return [_tokens(prompt, tokenizer, template_kwargs or {}) for prompt in prompts]


def _tokens(prompt: Any, tokenizer: Any, template_kwargs: Mapping[str, Any]) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False, **template_kwargs)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def try_rewards(functions: Sequence[Any], row: Mapping[str, Any], processing_class: Any) -> list[Reward]:
    """
    Call each reward function once, as the trainer would with one sample.

    Args:
        functions (sequence of reward functions): As [`BAPOTrainer`] takes them. A model that is one is not called.
        row (mapping): A row of the prompts. The made completion ends with the answer in its `solution`, boxed, where
            it has one.
        processing_class ([`~transformers.PreTrainedTokenizerBase`] or [`~transformers.ProcessorMixin`]): Tokenizer, or
            what holds it.
    """
    answer = next(iter(gold_answers(row.get("solution"))), None)
    text = "The answer is 1." if answer is None else f"The answer is \\boxed{{{answer}}}."
    prompt = row["prompt"]
    completion: Any = text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    inputs = {
        **{name: [value] for name, value in row.items() if name not in ("prompt", "completion", "completion_ids")},
        "prompts": [prompt],
        "completions": [completion],
        "completion_ids": [tokenizer(text, add_special_tokens=False)["input_ids"]],
        "trainer_state": TrainerState(),
        "log_extra": lambda *logged: None,
        "log_metric": lambda *logged: None,
    }
    return [_try(function, inputs, text) for function in functions if not isinstance(function, (str, nn.Module))]


def _try(function: Callable, inputs: Mapping[str, Any], text: str) -> Reward:
    name = getattr(function, "__name__", type(function).__name__)
    try:
        returned = asyncio.run(function(**inputs)) if is_async_callable(function) else function(**inputs)
    except Exception as error:  # whatever a user's function raises is what is asked for
        return Reward(name, text, None, f"raised {type(error).__name__}: {error}")
    returned = list(returned) if hasattr(returned, "__next__") else returned
    defect = rewards_defect(returned, inputs["prompts"], inputs["completions"])
    if defect is not None:
        return Reward(name, text, None, f"returned {defect}")
    value = returned[0]
    return Reward(name, text, None if value is None else float(value), None)
