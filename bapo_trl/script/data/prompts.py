"""Check prompts and tokenizers for what would fail, or train nothing useful, before the weights load."""

import warnings
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from datasets import Dataset, IterableDataset
from jinja2 import TemplateError

from ...bapo_config import BAPOConfig
from ...errors import InputError
from ...inputs.prompt_checks import start_of


TEXT_FOR_CHAT = "plain text, though the model has a chat template: `--prompt_column prompt` makes messages of it"

_ROWS_PER_READ = 10_000
GIVEN_TO_REWARDS = frozenset(("prompts", "completions", "trainer_state", "log_extra", "log_metric"))
"""Names of the arguments that TRL passes to reward functions in addition to the dataset's columns."""


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
    if isinstance(dataset, Dataset) and len(dataset):  # an empty one may have no columns
        for batch in dataset.select_columns("prompt").iter(_ROWS_PER_READ):
            yield from batch["prompt"]


def is_chat(dataset: Dataset | IterableDataset | None) -> bool:
    """Return whether the first prompt is a list of messages; `False` for an empty or missing dataset."""
    first: dict[str, Any] = next(iter(dataset or ()), {})
    prompt = first.get("prompt")
    return isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt)


def check_chat_template(dataset: Any, processing_class: Any, template_kwargs: Any = None) -> None:
    """Raise an `InputError` if prompts are chat messages and the tokenizer's chat template cannot format them."""
    # With a processor, the trainer rewrites the messages first
    if not is_chat(dataset) or hasattr(processing_class, "tokenizer"):
        return
    rows = _stored_prompts(dataset) if isinstance(dataset, Dataset) else [next(iter(dataset))["prompt"]]
    tried = set()
    for row, prompt in enumerate(rows):
        kind = tuple((message["role"], *message) for message in prompt)
        if kind in tried:  # a template accepts or rejects messages by their roles and fields
            continue
        tried.add(kind)
        try:
            tokens_of(prompt, processing_class, template_kwargs)
        except (TemplateError, ValueError) as error:
            raise InputError(
                f"The prompts are chat messages, but the chat template of `model_name_or_path` does not accept them "
                f"({error}), first in row {row}: use an instruct model, or text prompts (`prompt_column`). If the "
                "template has no system role, put the text of `system_prompt` into `prompt_template`."
            ) from error


def longest_prompt(dataset: Any, processing_class: Any, template_kwargs: Any = None) -> tuple[int, int]:
    """Return the row and the tokens of the prompt with the longest text; of a stream, among the first 1000."""
    tokenizer, is_stored = getattr(processing_class, "tokenizer", processing_class), isinstance(dataset, Dataset)
    prompts = list(_stored_prompts(dataset)) if is_stored else [row["prompt"] for row in islice(dataset, 1000)]
    row = max(range(len(prompts)), key=lambda row: len(str(prompts[row])))
    return row, len(tokens_of(prompts[row], tokenizer, template_kwargs))


def check_fit(config: Any, processing_class: Any, args: BAPOConfig, datasets: Mapping[str, Any]) -> None:
    """
    Reject a tokenizer with more tokens than the model, and a prompt that is too long for it (`InputError`).

    `datasets` are by their names in messages; streams pass. A model with rotary positions works beyond the window that
    it was trained for, but ever worse: for it, this only warns.
    """
    config, is_processor = config.get_text_config(), hasattr(processing_class, "tokenizer")
    check_tokenizer(getattr(processing_class, "tokenizer", processing_class), getattr(config, "vocab_size", None))
    window = _context_window(config)
    for name, dataset in datasets.items():
        if window is None or is_processor or not isinstance(dataset, Dataset) or not len(dataset):
            continue  # images take tokens, too
        row, length = longest_prompt(dataset, processing_class, args.chat_template_kwargs)
        if length + (args.max_completion_length or 0) <= window:
            continue
        message = (
            f"A prompt of the {name} dataset is too long: row {row} has {length} tokens, which leaves less than "
            f"`max_completion_length` {args.max_completion_length} of the model's window of {window} "
            "(`max_position_embeddings`). Prompts are not truncated: remove long ones with `dataset.filter`, lower "
            "`max_completion_length`, or use a model with a larger window."
        )
        if getattr(config, "rope_parameters", None) is None:
            raise InputError(message)
        warnings.warn(message, stacklevel=2)


def tokens_of(prompt: Any, tokenizer: Any, template_kwargs: Any = None) -> list[int]:
    """Tokenize a prompt as the trainer does."""
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    kwargs = {"add_generation_prompt": True, "tokenize": False, **(template_kwargs or {})}
    text = tokenizer.apply_chat_template(prompt, **kwargs)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _context_window(config: Any) -> int | None:
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
