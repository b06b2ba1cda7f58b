"""Checks of the datasets that a trainer is given, and of their prompts. What is no dataset at all is left to TRL."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset, IterableDataset

from ..errors import InputError


_ROWS_PER_READ = 10_000
_LONGEST_TOKENIZED = 1000
_TOKENS_OF_A_MESSAGE = 16  # that a chat template adds to the text
_PROMPT_FIX = "Give text, or a list of messages with `role` and `content`"


@dataclass(frozen=True)
class TokenLimits:
    """
    What a model takes.

    Args:
        window (`int`, *optional*): Largest number of tokens of a prompt and its completion; `None` where the model's
            configuration tells none.
        completion (`int`): `max_completion_length`.
        vocabulary (`int`, *optional*): Number of its tokens.
    """

    window: int | None
    completion: int
    vocabulary: int | None

    @property
    def longest_prompt(self) -> int | None:
        """Largest number of tokens of a prompt; `None` for no limit."""
        return None if self.window is None else self.window - self.completion


def check_columns(train_dataset, eval_dataset) -> None:
    """
    Refuse datasets without a `prompt` column. A stream that does not know its columns passes.

    Args:
        train_dataset, eval_dataset (`Dataset`, `IterableDataset` or, for evaluation, a mapping of names to these):
            Arguments of the trainer.

    Raises:
        ValueError: If one has columns, but no `prompt`.
    """
    for name, dataset in named_datasets(train_dataset, eval_dataset):
        columns = dataset.column_names if isinstance(dataset, (Dataset, IterableDataset)) else None
        if columns is not None and "prompt" not in columns:
            raise InputError(
                f"The {name} dataset has no `prompt` column, only {columns}: rename the column with the prompts, "
                "e.g. `dataset.rename_column('question', 'prompt')`."
            )


def check_number_of_prompts(train_dataset, args: Any) -> None:
    """
    Refuse a dataset that does not fill one generation: TRL leaves out an incomplete one, and would train nothing.

    Args:
        train_dataset (`Dataset` or `IterableDataset`): Prompts to train on. Of a stream the number is not known: it
            passes.
        args ([`~bapo_config.BAPOConfig`]): Settings of the run, in a process that knows the number of processes.

    Raises:
        ValueError: If it has fewer prompts than one generation takes, over all processes.
    """
    needed = args.generation_batch_size // args.num_generations
    if isinstance(train_dataset, Dataset) and len(train_dataset) < needed:
        raise InputError(
            f"The train dataset has {len(train_dataset)} prompts, but one generation takes {needed} "
            f"(`generation_batch_size` {args.generation_batch_size} / `num_generations` {args.num_generations}, over "
            f"all processes): nothing would be trained. Give at least {needed} prompts, or lower "
            f"`steps_per_generation` ({args.steps_per_generation}) or `per_device_train_batch_size` "
            f"({args.per_device_train_batch_size})."
        )


def prompt_defect(prompt: Any) -> str | None:
    """
    Return what keeps a value from being a prompt, in words that follow "it"; `None` if nothing does.

    Example:

    ```python
    >>> prompt_defect("1+1="), prompt_defect([{"role": "user", "content": "1+1="}])
    (None, None)
    >>> prompt_defect(3)
    'is of type int'

    ```
    """
    if isinstance(prompt, str):
        if not prompt:
            return "is empty"
        try:
            prompt.encode()
        except UnicodeEncodeError:
            return "has a character that UTF-8 cannot encode"
        return None
    if not isinstance(prompt, list):
        return "is None" if prompt is None else f"is of type {type(prompt).__name__}"
    if not prompt:
        return "is empty"
    are_messages = all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in prompt)
    if not are_messages:
        return "is a list, but not of messages with a `role` and a `content`"
    kinds = str | list | dict  # the last in messages of tools
    bare = [each for each in prompt if not (isinstance(each.get("content"), kinds) or each.get("tool_calls"))]
    return f"has a message of role '{bare[0]['role']}' without text or a list as its `content`" if bare else None


def check_prompts(train_dataset, eval_dataset) -> None:
    """
    Refuse datasets with a value that is no prompt: neither text nor chat messages, or empty.

    Args:
        train_dataset, eval_dataset (`Dataset`, `IterableDataset` or, for evaluation, a mapping of names to these):
            Arguments of the trainer. A stream, and what a transform makes, is not known yet: these pass.

    Raises:
        ValueError: With the number of such rows, the first of them and the fix.
    """
    for name, dataset in named_datasets(train_dataset, eval_dataset):
        defects = ((row, prompt_defect(prompt)) for row, prompt in enumerate(stored_prompts(dataset)))
        found = [(row, defect) for row, defect in defects if defect is not None]
        if found:
            row, defect = found[0]
            count = f"{len(found)} of the {len(dataset)} prompts"
            raise InputError(
                f"{count} of the {name} dataset cannot be used: that of row {row} {defect}. {_PROMPT_FIX}, or leave "
                "such rows out with `dataset.filter`."
            )


def check_batch_prompts(prompts: Sequence[Any]) -> None:
    """Refuse a prompt of a batch that is none, with what is wrong with it (`ValueError`)."""
    for prompt in prompts:
        defect = prompt_defect(prompt)
        if defect is not None:
            raise InputError(f"A prompt of the dataset cannot be used: {start_of(prompt)} {defect}. {_PROMPT_FIX}.")


def check_batch_tokens(prompts: Sequence[Any], prompt_ids: Sequence[Sequence[int]], limits: TokenLimits) -> None:
    """
    Refuse prompts that the model cannot take, by their tokens.

    Args:
        prompts (sequence): Prompts of a batch.
        prompt_ids (sequence of sequences of `int`): Their tokens.
        limits ([`TokenLimits`]): Those of the model.

    Raises:
        ValueError: If one has no token, more than fit into the window with its completion, or one that the model does
            not know.
    """
    longest = limits.longest_prompt
    for prompt, ids in zip(prompts, prompt_ids, strict=False):
        if not len(ids):
            raise InputError(
                f"The prompt {start_of(prompt)} has no token: the tokenizer knows none of its characters."
            )
        if longest is not None and len(ids) > longest:
            raise InputError(f"The prompt {start_of(prompt)} is too long: it has {len(ids)} tokens, {_says(limits)}")
        if limits.vocabulary is not None and max(ids) >= limits.vocabulary:
            raise InputError(
                f"The prompt {start_of(prompt)} has the token {max(ids)}, but the model has {limits.vocabulary} "
                "tokens: take the tokenizer that belongs to the model, or make room with "
                "`model.resize_token_embeddings(len(tokenizer))`."
            )


def check_window(train_dataset, eval_dataset, tokenize, limits: TokenLimits) -> None:
    """
    Refuse completions, or prompts with them, that do not fit into the model's window, if it has one.

    Args:
        train_dataset, eval_dataset, tokenize, limits: As in [`check_prompt_lengths`].

    Raises:
        ValueError: As there.
    """
    if limits.longest_prompt is None:
        return
    if limits.longest_prompt <= 0:
        raise InputError(
            f"`max_completion_length` is {limits.completion}, but the model's window (`max_position_embeddings`) "
            f"is {limits.window} with the prompt: lower `max_completion_length`."
        )
    check_prompt_lengths(train_dataset, eval_dataset, tokenize, limits)


def check_prompt_lengths(train_dataset, eval_dataset, tokenize, limits: TokenLimits) -> None:
    """
    Refuse datasets with prompts that do not fit into the model's window with their completions.

    Reads the lengths of all texts, and has those tokenized that may be too long, the longest first and no more than a
    thousand. What it misses is refused in its batch, by [`check_batch_tokens`].

    Args:
        train_dataset, eval_dataset (`Dataset`, `IterableDataset` or, for evaluation, a mapping of names to these):
            Arguments of the trainer. Streams pass, and what a transform makes.
        tokenize (`Callable`): Prompts in, lists of token ids out.
        limits ([`TokenLimits`]): Those of the model.

    Raises:
        ValueError: With the number of such prompts, the longest of them, the window and the fix.
    """
    for name, dataset in named_datasets(train_dataset, eval_dataset):
        sizes = [_size(prompt) for prompt in stored_prompts(dataset)]
        if not sizes:
            continue
        shortest = min(range(len(sizes)), key=sizes.__getitem__)
        (ids,) = tokenize([dataset[shortest]["prompt"]])
        around = len(ids)  # at least what a template adds
        rows = [row for row, size in enumerate(sizes) if size + around > limits.longest_prompt]
        rows = sorted(rows, key=sizes.__getitem__, reverse=True)[:_LONGEST_TOKENIZED]
        lengths: Counter[int] = Counter()
        for start in range(0, len(rows), 100):
            part = rows[start : start + 100]
            prompts = [dataset[row]["prompt"] for row in part]
            lengths.update({row: len(ids) for row, ids in zip(part, tokenize(prompts), strict=True)})
        too_long = [row for row, length in lengths.items() if length > limits.longest_prompt]
        if too_long:
            ((row, length),) = lengths.most_common(1)
            at_least = "At least " if len(rows) == _LONGEST_TOKENIZED else ""
            raise InputError(
                f"{at_least}{len(too_long)} of the {len(dataset)} prompts of the {name} dataset are too long: the "
                f"longest, row {row}, has {length} tokens, {_says(limits)}"
            )


def _says(limits: TokenLimits) -> str:
    return (
        f"but the model's window of {limits.window} (`max_position_embeddings`) leaves {limits.longest_prompt} before "
        f"a completion of `max_completion_length` {limits.completion}. No prompt is cut: leave such rows out with "
        "`dataset.filter`, lower `max_completion_length`, or take a model with a larger window."
    )


def named_datasets(train_dataset, eval_dataset) -> list[tuple[str, Any]]:
    """Return the datasets of a trainer with the names that messages call them; a split may be called `train` too."""
    eval_datasets = eval_dataset if isinstance(eval_dataset, dict) else {"eval": eval_dataset}
    return [("train", train_dataset), *eval_datasets.items()]


def stored_prompts(dataset) -> Iterator[Any]:
    """
    Yield the prompts of a dataset; none of a stream, of a dataset whose transform may make others, or with images.

    Raises:
        ValueError: If a text is not UTF-8.
    """
    is_stored = isinstance(dataset, Dataset) and dataset.format["type"] != "custom"
    feature = dataset.features.get("prompt") if is_stored else None
    if feature is not None and not _has_media(feature):  # each image would be decoded
        prompts: Any = dataset.select_columns("prompt").with_format(None)
        try:
            for batch in prompts.iter(_ROWS_PER_READ):
                yield from batch["prompt"]
        except UnicodeDecodeError as error:
            raise InputError(
                f"A prompt of the dataset is not UTF-8 ({error}): convert the file it is from."
            ) from error


def _has_media(feature: Any) -> bool:
    if isinstance(feature, dict):
        return any(map(_has_media, feature.values()))
    if hasattr(feature, "feature"):
        return _has_media(feature.feature)
    return getattr(feature, "decode", False) and type(feature).__name__ != "Json"


def start_of(prompt: Any, length: int = 60) -> str:
    """Return the begin of a prompt, for a message."""
    text = repr(prompt)
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _size(prompt: Any) -> int:
    """Return the bytes of a prompt's text, which are seldom fewer than its tokens."""
    if isinstance(prompt, str):
        return len(prompt) if prompt.isascii() else len(prompt.encode())
    contents = (message.get("content") for message in prompt)
    return sum(_TOKENS_OF_A_MESSAGE + (_size(text) if isinstance(text, str) else 0) for text in contents)
