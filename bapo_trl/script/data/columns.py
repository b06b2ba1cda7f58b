"""Bring the columns of the data into the form that trainer and rewards read."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from datasets import Dataset

from ...checkpoints.rank_errors import from_main_process
from ...errors import InputError
from ...evaluation.answers import gold_texts
from ..settings.arguments import BAPOScriptArguments
from .load import Data, Rows
from .prompts import GIVEN_TO_REWARDS, TEXT_FOR_CHAT, is_chat, is_prompt
from .text_files import is_as_written, with_columns


def format_data(data: Data, flags: BAPOScriptArguments, processing_class: Any) -> Data:
    """Return the data with the columns that trainer and rewards read."""
    makes_chats = _forms_prompts(flags) and getattr(processing_class, "chat_template", None) is not None
    if flags.system_prompt is not None and not makes_chats:
        raise InputError(
            "`system_prompt` is set, but the tokenizer of `model_name_or_path` has no chat template: put the text "
            "into `prompt_template`, or use a model with a chat template."
        )
    train = format_prompts(data.train, flags, makes_chats, f"train dataset ({data.title})")
    test = format_prompts(data.test, flags, makes_chats, f"eval dataset ({data.test_title or data.title})")
    return replace(data, train=train, test=test)


def _forms_prompts(flags: BAPOScriptArguments) -> bool:
    """Return whether a flag changes how prompts are made from the dataset."""
    return any(flag is not None for flag in (flags.prompt_column, flags.prompt_template, flags.system_prompt))


def format_prompts(
    dataset: Rows | None, flags: BAPOScriptArguments, makes_chats: bool = False, name: str = "dataset"
) -> Any:
    """
    Return the dataset with the column `prompt` and, if `answer_column` is set, the column `solution`.

    With `makes_chats`, a text prompt becomes a user message. All columns are kept for the reward functions, except
    prompt and answer columns whose names TRL uses for other arguments. An existing `solution` is not replaced.
    """
    first: dict[str, Any] | None = next(iter(dataset or ()), None)
    if dataset is None or first is None:
        return dataset
    prompt = _find(first, flags.prompt_column or ["prompt"], "prompt_column", name)
    answer = _find(first, flags.answer_column, "answer_column", name) if flags.answer_column else None
    template = flags.prompt_template
    if template is not None and not any(f"{{{column}}}" in template for column in ("prompt", *first)):
        raise InputError(
            f"`prompt_template` is {template!r}, which has no placeholder for the prompt: add {{prompt}}, or the "
            f"name of a column in braces ({', '.join(first)})."
        )
    adds_solution = answer is not None and "solution" not in first
    if not (_forms_prompts(flags) or adds_solution):
        return dataset

    is_written = is_as_written(dataset)

    def formatted(row: Mapping[str, Any]) -> dict[str, Any]:
        columns = {"prompt": _form_prompt(_get(row, prompt), row, flags, makes_chats)}
        return {**columns, "solution": _as_answer(_get(row, answer), is_written)} if adds_solution else columns

    return with_columns(dataset, formatted, sorted(GIVEN_TO_REWARDS & {prompt, answer}))


@from_main_process  # it reads all rows
def prompt_lines(data: Data, processing_class: Any) -> str:
    """Return the console lines on the kind of the prompts, and on those without an answer."""
    kind = "plain text" if getattr(processing_class, "chat_template", None) is None else TEXT_FOR_CHAT
    lines = [f"Prompts: {'chat messages' if is_chat(data.prompts) else kind}"]
    if isinstance(data.train, Dataset) and "solution" in data.train.column_names:
        missing = sum(not gold_texts(answer) for answer in data.train["solution"])
        if missing:
            lines.append(
                f"Note: {missing} of {len(data.train)} prompts have no `solution`, so rewards that read it give none."
            )
    return "\n".join(lines)


def _find(row: Mapping[str, Any], columns: Sequence[str], flag: str, name: str) -> str:
    """Return the first of the columns that a row has. A dot selects a field of a column, as in `column.field`."""
    fields = [f"{name}.{field}" for name, value in row.items() if isinstance(value, dict) for field in value]
    for column in columns:
        if column in (*row, *fields):
            return column
    named = " or ".join(f"`{column}`" for column in columns)
    raise InputError(f"The {name} has no {named} column, only {[*row, *fields]}: set `--{flag}` to one of them.")


def _get(row: Mapping[str, Any], column: str) -> Any:
    if column in row:
        return row[column]
    name, _, field = column.partition(".")
    return (row[name] or {}).get(field)  # a null is a missing value, as it is in a plain column


def _form_prompt(prompt: Any, row: Mapping[str, Any], flags: BAPOScriptArguments, makes_chats: bool) -> Any:
    if prompt in (None, "", []):
        return None  # `check_prompts` raises an error later
    if isinstance(prompt, list) and not is_prompt(prompt):
        return prompt  # likewise
    if isinstance(prompt, list):
        messages = [dict(message) for message in prompt]
        messages[-1]["content"] = _fill(flags.prompt_template, messages[-1]["content"], row)
    else:
        text = _fill(flags.prompt_template, str(prompt), row)
        if not makes_chats:
            return text
        messages = [{"role": "user", "content": text}]
    if flags.system_prompt is None:
        return messages
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": flags.system_prompt}, *others]


def _fill(template: str | None, prompt: Any, row: Mapping[str, Any]) -> Any:
    """Return the template with its placeholders filled by the prompt and the row's columns; other braces stay."""
    if template is None:
        return prompt
    values = {**row, "prompt": prompt}

    def value(place: re.Match) -> str:
        if not isinstance(prompt, str):
            raise InputError(
                f"`prompt_template` needs prompts of text, but one is {prompt!r}: put the template's text into the "
                "prompts, and remove `prompt_template`."
            )
        if values[place[1]] is None:
            raise InputError(
                f"`prompt_template` names the column `{place[1]}`, which is empty for the prompt {prompt!r}: fill it, "
                "or remove the prompt."
            )
        return str(values[place[1]])

    return re.sub(rf"\{{({'|'.join(map(re.escape, values))})\}}", value, template)


def _as_answer(value: Any, is_written: bool) -> Any:
    """Return an answer as text if it is a number (of a file, as written), else unchanged; NaN is missing."""
    if not isinstance(value, int | float):
        return value
    text = next(iter(gold_texts(value)), None)
    return str(value) if is_written and text is not None else text
