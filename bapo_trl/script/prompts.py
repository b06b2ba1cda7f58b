"""Check prompts and tokenizers for what would fail, or train nothing useful, before the weights load."""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
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

_QUANTILES = (0.05, 0.5, 0.95, 1.0)

_ROWS_PER_READ = 10_000
GIVEN_TO_REWARDS = frozenset(("prompts", "completions", "trainer_state", "log_extra", "log_metric"))
"""Names of the arguments that TRL passes to reward functions in addition to the dataset's columns."""


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


def is_prompt(value: Any) -> bool:
    """Return whether a value is a non-empty text or list of chat messages."""
    if isinstance(value, list):
        return bool(value) and all(map(_is_message, value))
    return isinstance(value, str) and value != ""


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    return isinstance(value.get("content"), str | list | dict) or bool(value.get("tool_calls"))  # tools give a dict


def check_prompts(train_dataset, eval_dataset) -> None:
    """
    Raise an `InputError` if a dataset has a prompt that is empty, or neither text nor chat messages.

    Streams and datasets with a transform pass, as their prompts are not known yet.
    """
    for name, dataset in named_datasets(train_dataset, eval_dataset):
        found = [(row, prompt) for row, prompt in enumerate(stored_prompts(dataset)) if not is_prompt(prompt)]
        if found:
            row, prompt = found[0]
            raise InputError(
                f"{len(found)} of the {len(dataset)} prompts of the {name} dataset cannot be used: the prompt of row "
                f"{row} is {start_of(prompt)}. Use text, or a list of messages with `role` and `content`, or remove "
                "these rows with `dataset.filter`."
            )


def named_datasets(train_dataset, eval_dataset) -> list[tuple[str, Any]]:
    """Return the trainer's datasets with their names in messages; an evaluation split may be named `train` too."""
    eval_datasets = eval_dataset if isinstance(eval_dataset, dict) else {"eval": eval_dataset}
    return [("train", train_dataset), *eval_datasets.items()]


def stored_prompts(dataset) -> Iterator[Any]:
    """Yield the prompts of a dataset; none of a stream, a dataset with a transform, or a dataset with images."""
    is_stored = isinstance(dataset, Dataset) and dataset.format["type"] != "custom"
    feature = dataset.features.get("prompt") if is_stored else None
    if feature is not None and not _has_media(feature):  # reading would decode each image
        prompts: Any = dataset.select_columns("prompt").with_format(None)
        for batch in prompts.iter(_ROWS_PER_READ):
            yield from batch["prompt"]


def _has_media(feature: Any) -> bool:
    if isinstance(feature, dict):
        return any(map(_has_media, feature.values()))
    if hasattr(feature, "feature"):
        return _has_media(feature.feature)
    return getattr(feature, "decode", False) and type(feature).__name__ != "Json"


def is_chat(dataset: Dataset | IterableDataset | None) -> bool:
    """Return whether the first prompt is a list of messages; `False` for an empty or missing dataset."""
    first: dict[str, Any] = next(iter(dataset or ()), {})
    prompt = first.get("prompt")
    return isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt)


def check_chat_template(
    dataset: Dataset | IterableDataset | None, processing_class: Any, template_kwargs: Any = None
) -> None:
    """Raise an `InputError` if prompts are chat messages and the tokenizer's chat template cannot format them."""
    # With a processor, the trainer rewrites the messages first
    if not is_chat(dataset) or hasattr(processing_class, "tokenizer"):
        return
    rows = stored_prompts(dataset) if isinstance(dataset, Dataset) else [next(iter(dataset))["prompt"]]
    tried = set()
    for row, prompt in enumerate(rows):
        kind = tuple((message["role"], *message) for message in prompt)
        if kind in tried:  # a template accepts or rejects messages by their roles and fields
            continue
        tried.add(kind)
        try:
            processing_class.apply_chat_template(prompt, tokenize=False, **(template_kwargs or {}))
        except (TemplateError, ValueError) as error:
            raise InputError(
                f"The prompts are chat messages, but the chat template of `model_name_or_path` does not accept them "
                f"({error}), first in row {row}: use an instruct model, or text prompts (`prompt_column`). If the "
                "template has no system role, put the text of `system_prompt` into `prompt_template`."
            ) from error


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
    config, is_processor = config.get_text_config(), hasattr(processing_class, "tokenizer")
    check_tokenizer(getattr(processing_class, "tokenizer", processing_class), getattr(config, "vocab_size", None))
    if context_window(config) is None or is_processor:  # images take tokens too
        return
    try:
        _check_window(config, processing_class, args, datasets)
    except InputError as rejection:
        if getattr(config, "rope_parameters", None) is None:
            raise
        warnings.warn(str(rejection), stacklevel=2)


def _check_window(config: Any, processing_class: Any, args: BAPOConfig, datasets: Iterable[tuple[str, Any]]) -> None:
    window, room, completion = context_window(config), room_of(config, args), args.max_completion_length
    if room is None or room <= 0:
        raise InputError(
            f"`max_completion_length` is {completion}, but the model's window (`max_position_embeddings`) "
            f"is {window} with the prompt: lower `max_completion_length`."
        )
    for name, found in datasets:
        if isinstance(found, Dataset) and len(found):
            found = look_at_prompts(found, processing_class, room, args.chat_template_kwargs)
        if isinstance(found, Prompts) and found.too_long:
            of_them = "" if found.num_sampled == found.num_prompts else "that were looked at "
            raise InputError(
                f"{found.too_long} of the {found.num_sampled} prompts of the {name} dataset {of_them}are too long: "
                f"the longest, row {found.longest_row}, has {found.lengths[1.0]} tokens, but the model's window of "
                f"{window} (`max_position_embeddings`) leaves {room} before a completion of `max_completion_length` "
                f"{completion}. Prompts are not truncated: remove long ones with `dataset.filter`, lower "
                "`max_completion_length`, or use a model with a larger window."
            )


def _tokens(prompt: Any, tokenizer: Any, template_kwargs: Mapping[str, Any]) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False, **template_kwargs)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def context_window(config: Any) -> int | None:
    """
    Return the largest number of tokens of prompt and completion, or `None` if the text model's config has no limit.

    Scaled rotary embeddings extend the window that the model was trained with by `factor`.
    """
    window = getattr(config, "max_position_embeddings", None)
    if window is None:
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    trained = rope.get("original_max_position_embeddings") or window
    return max(window, int(trained * (rope.get("factor") or 1)))


def room_of(config: Any, args: BAPOConfig) -> int | None:
    """Return the longest prompt that leaves room for a completion; `None` for a text model without a window."""
    window = context_window(config)
    return None if window is None else window - (args.max_completion_length or 0)


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
