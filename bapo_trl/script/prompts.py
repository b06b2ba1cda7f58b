"""Rows of any columns become prompts and answers as the trainer and the reward functions take them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset
from jinja2 import TemplateError

from ..errors import InputError
from ..evaluation.answers import gold_texts
from ..inputs.prompt_checks import GIVEN_TO_REWARDS, is_prompt
from ..plan.samples import TEXT_FOR_CHAT
from ..report.runs import read_settings
from .arguments import BAPOScriptArguments
from .datasets import Data


Rows = Dataset | IterableDataset


def format_data(data: Data, flags: BAPOScriptArguments, processing_class: Any) -> Data:
    """Give all prompts the columns that trainer and rewards read."""
    makes_chats = _forms_prompts(flags) and getattr(processing_class, "chat_template", None) is not None
    if flags.system_prompt is not None and not makes_chats:
        raise InputError(
            "`system_prompt` is set, but the tokenizer of `model_name_or_path` has no chat template: put the text "
            "into `prompt_template`, or take a model with one."
        )
    train, test = data.train, data.test
    if train is not None:
        train = format_prompts(train, flags, makes_chats, f"train dataset ({data.title})")
    if test is not None:
        test = format_prompts(test, flags, makes_chats, f"eval dataset ({data.test_title or data.title})")
    return replace(data, train=train, test=test)


def _forms_prompts(flags: BAPOScriptArguments) -> bool:
    """Return whether prompts may be others than those of the column `prompt`."""
    return any(flag is not None for flag in (flags.prompt_column, flags.prompt_template, flags.system_prompt))


def format_prompts(
    dataset: Rows, flags: BAPOScriptArguments, makes_chats: bool = False, name: str = "dataset"
) -> Rows:
    """
    Return the dataset with the column `prompt`, and with `solution` where answers are asked for.

    With `makes_chats`, a prompt that is text becomes the message of a user. All columns stay for the reward functions,
    but for those read here whose names the trainer gives values of its own. A `solution` of the dataset's own stays.
    """
    first = next(iter(dataset), None)
    if first is None:
        return dataset
    prompt = _find(first, flags.prompt_column or ["prompt"], "prompt_column", name)
    answer = _find(first, flags.answer_column, "answer_column", name) if flags.answer_column else None
    template = flags.prompt_template
    if template is not None and not any(f"{{{column}}}" in template for column in ("prompt", *first)):
        raise InputError(
            f"`prompt_template` is {template!r}, which has no place for the prompt: write {{prompt}} there, or the "
            f"name of a column in braces ({', '.join(first)})."
        )
    adds_solution = answer is not None and "solution" not in first
    if not (_forms_prompts(flags) or adds_solution):
        return dataset

    def formatted(row: Mapping[str, Any]) -> dict[str, Any]:
        columns = {"prompt": _form_prompt(_get(row, prompt), row, flags, makes_chats)}
        return {**columns, "solution": _as_answer(_get(row, answer))} if adds_solution else columns

    return dataset.map(formatted, remove_columns=sorted(GIVEN_TO_REWARDS & {prompt, answer}))


def is_chat(dataset: Rows | None) -> bool:
    """Tell whether the first prompt is a list of messages; not so of an empty dataset or of none."""
    first: dict[str, Any] = next(iter(dataset or ()), {})
    prompt = first.get("prompt")
    return isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt)


def prompt_lines(data: Data, processing_class: Any, model: str, flags: BAPOScriptArguments) -> str:
    """Return what the terminal says of the prompts, and of answers and forms that may not be what was meant."""
    kind = "plain text" if getattr(processing_class, "chat_template", None) is None else TEXT_FOR_CHAT
    lines = [f"Prompts: {'chat messages' if is_chat(data.prompts) else kind}"]
    if data.train is None:
        trained = read_settings(Path(model))
        other = [
            f"`{name}` {trained[name]!r}, now {getattr(flags, name)!r}"
            for name in ("prompt_template", "system_prompt")
            if name in trained and trained[name] != getattr(flags, name)
        ]
        if other:
            lines.append(f"Note: {model} was trained on prompts of another form: {'; '.join(other)}.")
    elif isinstance(data.train, Dataset) and "solution" in data.train.column_names:
        missing = sum(not gold_texts(answer) for answer in data.train["solution"])
        if missing:
            lines.append(
                f"Note: {missing} of {len(data.train)} prompts have no `solution`: a reward that reads it gives none."
            )
        row, columns = data.train[0], flags.answer_column
        column = _find(row, columns, "answer_column", "dataset") if columns else None
        if column is not None and _as_answer(_get(row, column)) != row["solution"]:
            lines.append(
                f"Note: rewards read the data's own column `solution`, not `{column}`: rename it if that is wrong."
            )
    return "\n".join(lines)


def check_chat_template(dataset: Rows | None, processing_class: Any, template_kwargs: Any = None) -> None:
    """Refuse prompts that are chat messages where the tokenizer has no chat template for them (`InputError`)."""
    # A processor's messages are rewritten by the trainer
    if not is_chat(dataset) or hasattr(processing_class, "tokenizer"):
        return
    try:
        processing_class.apply_chat_template(next(iter(dataset))["prompt"], tokenize=False, **(template_kwargs or {}))
    except (TemplateError, ValueError) as error:
        raise InputError(
            f"The prompts are chat messages, and the chat template of `model_name_or_path` does not take them "
            f"({error}): take an instruct model, or give prompts that are text (`prompt_column`). If it knows no "
            "system role, write the text of `system_prompt` into `prompt_template`."
        ) from error


def _find(row: Mapping[str, Any], columns: Sequence[str], flag: str, name: str) -> str:
    """Return the first of the columns that a row has, a dot leads to a field of one."""
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
    return row[name][field]


def _form_prompt(prompt: Any, row: Mapping[str, Any], flags: BAPOScriptArguments, makes_chats: bool) -> Any:
    if prompt in (None, "", []):
        return None  # `check_prompts` refuses it
    if isinstance(prompt, list) and not is_prompt(prompt):
        return prompt  # so too
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
    """Return the template with the prompt and the row's columns at their places; other braces stay."""
    if template is None:
        return prompt
    values = {**row, "prompt": prompt}

    def value(place: re.Match) -> str:
        if values[place[1]] is None or not isinstance(prompt, str):
            raise InputError(f"`prompt_template` takes the text of `{place[1]}`, which the prompt {prompt!r} lacks.")
        return str(values[place[1]])

    return re.sub(rf"\{{({'|'.join(map(re.escape, values))})\}}", value, template)


def _as_answer(value: Any) -> Any:
    """Return an answer as text if it is a number, and as it is if not: a column of the dataset has one type."""
    return next(iter(gold_texts(value)), None) if isinstance(value, int | float) else value
