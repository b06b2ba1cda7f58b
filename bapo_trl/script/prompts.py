"""Check prompts and tokenizers for what would fail, or train nothing useful, before the weights load."""

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from datasets import Dataset, IterableDataset
from jinja2 import TemplateError

from ..bapo_config import BAPOConfig
from ..errors import InputError
from ..inputs.prompt_checks import start_of


SAMPLED_PROMPTS = 1000
"""Prompts that are tokenized, evenly over those that there are, and the longest text; of a stream, the first ones."""

TEXT_FOR_CHAT = "plain text, though the model has a chat template: `--prompt_column prompt` makes messages of it"

_ROWS_PER_READ = 10_000
GIVEN_TO_REWARDS = frozenset(("prompts", "completions", "trainer_state", "log_extra", "log_metric"))
"""Names of the arguments that TRL passes to reward functions in addition to the dataset's columns."""


@dataclass(frozen=True)
class Prompts:
    """The prompts of a run as its model gets them. Lengths are in tokens, of those that were tokenized."""

    first: str  # after the chat template
    lacks_messages: bool  # text, though the model has a chat template
    num_prompts: int | None  # `None` for a stream
    num_sampled: int
    median: int
    longest: int
    longest_row: int
    room: int | None  # longest prompt that leaves room for a completion; `None` for a model without a window
    too_long: int


def is_prompt(value: Any) -> bool:
    """Return whether a value is a non-empty text or list of chat messages."""
    if isinstance(value, list):
        return bool(value) and all(map(_is_message, value))
    return isinstance(value, str) and value != ""


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    return isinstance(value.get("content"), str | list | dict) or bool(value.get("tool_calls"))  # tools give a dict


def check_prompts(dataset: Any, name: str) -> None:
    """Raise an `InputError` if a dataset has a prompt that is empty, or neither text nor chat messages."""
    found = [(row, prompt) for row, prompt in enumerate(_stored_prompts(dataset)) if not is_prompt(prompt)]
    if found:
        row, prompt = found[0]
        raise InputError(
            f"{len(found)} of the {len(dataset)} prompts of the {name} dataset cannot be used: the prompt of row "
            f"{row} is {start_of(prompt)}. Use text, or a list of messages with `role` and `content`, or remove "
            "these rows with `dataset.filter`."
        )


def _stored_prompts(dataset: Any) -> Iterator[Any]:
    """Yield the prompts of a dataset; none of a stream."""
    if isinstance(dataset, Dataset):
        for batch in dataset.select_columns("prompt").iter(_ROWS_PER_READ):
            yield from batch["prompt"]


def is_chat(dataset: Dataset | IterableDataset | None) -> bool:
    """Return whether the first prompt is a list of messages; `False` for an empty or missing dataset."""
    first: dict[str, Any] = next(iter(dataset or ()), {})
    prompt = first.get("prompt")
    return isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt)


def check_chat_template(dataset: Any, processing_class: Any, template_kwargs: Any = None) -> None:
    """Raise an `InputError` if prompts are chat messages and the tokenizer's chat template cannot format the first."""
    # With a processor, the trainer rewrites the messages first
    if not is_chat(dataset) or hasattr(processing_class, "tokenizer"):
        return
    try:
        _tokens(next(iter(dataset))["prompt"], processing_class, template_kwargs or {})
    except (TemplateError, ValueError) as error:
        raise InputError(
            f"The prompts are chat messages, but the chat template of `model_name_or_path` does not accept them "
            f"({error}): use an instruct model, or text prompts (`prompt_column`). If the template has no system "
            "role, put the text of `system_prompt` into `prompt_template`."
        ) from error


def look_at_prompts(dataset: Any, processing_class: Any, config: Any, args: BAPOConfig) -> Prompts:
    """Tokenize prompts as the trainer does, for a model with this configuration."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if isinstance(dataset, Dataset):
        num_prompts = len(dataset)
        sizes = [len(str(prompt)) for prompt in _stored_prompts(dataset)]
        longest = max(range(num_prompts), key=sizes.__getitem__)
        rows = sorted({*range(0, num_prompts, math.ceil(num_prompts / SAMPLED_PROMPTS)), longest})
        prompts = dataset.select(rows)["prompt"][:]
    else:
        prompts, num_prompts = [row["prompt"] for row in islice(dataset, SAMPLED_PROMPTS)], None
        rows = list(range(len(prompts)))
    token_ids = [_tokens(prompt, tokenizer, args.chat_template_kwargs or {}) for prompt in prompts]
    by_length = sorted(zip(map(len, token_ids), rows, strict=True))
    window = context_window(config)
    room = None if window is None else window - (args.max_completion_length or 0)
    return Prompts(
        first=tokenizer.decode(token_ids[0]),
        lacks_messages=isinstance(prompts[0], str) and getattr(tokenizer, "chat_template", None) is not None,
        num_prompts=num_prompts,
        num_sampled=len(rows),
        median=by_length[(len(rows) - 1) // 2][0],
        longest=by_length[-1][0],
        longest_row=by_length[-1][1],
        room=room,
        too_long=0 if room is None else sum(length > room for length, _ in by_length),
    )


def check_fit(config: Any, processing_class: Any, args: BAPOConfig, datasets: Mapping[str, Any]) -> None:
    """
    Reject a tokenizer with more tokens than the model, and prompts that are too long for it (`InputError`).

    `datasets` are by their names in messages; streams pass. A model with rotary positions works beyond the window that
    it was trained for, but ever worse: for it, this only warns.
    """
    text, is_processor = config.get_text_config(), hasattr(processing_class, "tokenizer")
    check_tokenizer(getattr(processing_class, "tokenizer", processing_class), getattr(text, "vocab_size", None))
    if context_window(config) is None or is_processor:  # images take tokens too
        return
    for name, dataset in datasets.items():
        if not isinstance(dataset, Dataset) or not len(dataset):
            continue
        found = look_at_prompts(dataset, processing_class, config, args)
        if not found.too_long:
            continue
        of_them = "" if found.num_sampled == found.num_prompts else "that were looked at "
        message = (
            f"{found.too_long} of the {found.num_sampled} prompts of the {name} dataset {of_them}are too long: "
            f"the longest, row {found.longest_row}, has {found.longest} tokens, but the model's window of "
            f"{context_window(config)} (`max_position_embeddings`) leaves {found.room} before a completion of "
            f"`max_completion_length` {args.max_completion_length}. Prompts are not truncated: remove long ones with "
            "`dataset.filter`, lower `max_completion_length`, or use a model with a larger window."
        )
        if getattr(text, "rope_parameters", None) is None:
            raise InputError(message)
        warnings.warn(message, stacklevel=2)


def _tokens(prompt: Any, tokenizer: Any, template_kwargs: Any) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False, **template_kwargs)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def context_window(config: Any) -> int | None:
    """
    Return the largest number of tokens of prompt and completion, or `None` if the text model's config has no limit.

    Scaled rotary embeddings extend the window that the model was trained with by `factor`.
    """
    config = config.get_text_config()
    window = getattr(config, "max_position_embeddings", None)
    if window is None:
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    trained = rope.get("original_max_position_embeddings") or window
    return max(window, int(trained * (rope.get("factor") or 1)))


def check_tokenizer(tokenizer: Any, vocabulary: int | None = None) -> None:
    """
    Raise an `InputError` if a tokenizer has no end token, or more tokens than the model.

    Tokens that were added to the tokenizer may exceed the model's vocabulary, as prompts may not contain them.
    """
    if tokenizer.eos_token_id is None:
        raise InputError(
            "The tokenizer has no `eos_token`, so completions would never end: set `tokenizer.eos_token` to the "
            "token that ends a completion (`eos_token` in the model's tokenizer_config.json)."
        )
    last = max(tokenizer.vocab_size - 1, tokenizer.eos_token_id, tokenizer.pad_token_id or 0)
    if vocabulary is not None and last >= vocabulary:
        raise InputError(
            f"The tokenizer has token ids up to {last}, but the model's `vocab_size` is {vocabulary}: use the model's "
            "own tokenizer, or enlarge the model with `model.resize_token_embeddings(len(tokenizer))`."
        )
