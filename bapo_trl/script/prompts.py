"""Rows of any columns become prompts and answers as the trainer and the reward functions take them."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset
from jinja2 import TemplateError

from ..errors import InputError
from ..evaluation.answers import gold_texts
from ..inputs.prompt_checks import GIVEN_TO_REWARDS, is_prompt, start_of
from ..plan.samples import TEXT_FOR_CHAT
from ..report.runs import read_settings
from .arguments import BAPOScriptArguments
from .datasets import Data


@dataclass(frozen=True)
class PromptFormat:
    """
    How a row becomes a prompt: by the flags of these names, see [`~arguments.BAPOScriptArguments`].

    Of several columns, the first that a dataset has is taken; a dot leads into a column with fields.
    """

    prompt_columns: Sequence[str] | None = None  # text or chat messages; by default `prompt`
    answer_columns: Sequence[str] | None = None
    template: str | None = None  # `{prompt}` stands for the prompt, `{NAME}` for a column; other braces are text
    system_prompt: str | None = None
    makes_chats: bool = False  # whether a prompt that is text becomes the message of a user

    @property
    def forms_prompts(self) -> bool:
        """Whether prompts may be others than those of the column `prompt`."""
        return any(part is not None for part in (self.prompt_columns, self.template, self.system_prompt))

    def with_chats_if(self, has_chat_template: bool) -> "PromptFormat":
        """Return the format for a tokenizer with or without a chat template; without, refuse a system prompt."""
        if self.system_prompt is not None and not has_chat_template:
            raise InputError(
                "`system_prompt` is set, but the tokenizer of `model_name_or_path` has no chat template, so there "
                "are no system messages: put the text into `prompt_template`, or take a model with a chat template."
            )
        return replace(self, makes_chats=has_chat_template and self.forms_prompts)


def format_data(data: Data, script_args: BAPOScriptArguments, load_tokenizer: Callable[[], Any]) -> Data:
    """Give all prompts the columns that trainer and rewards read. The tokenizer is loaded only if chats are formed."""
    form = PromptFormat(
        script_args.prompt_column, script_args.answer_column, script_args.prompt_template, script_args.system_prompt
    )
    if form.forms_prompts:
        form = form.with_chats_if(bool(getattr(load_tokenizer(), "chat_template", None)))
    parts = {"train": data.train, "test": data.test}
    names = {"train": f"train dataset ({data.title})", "test": f"eval dataset ({data.test_title or data.title})"}
    formatted: dict[str, Any] = {
        part: format_prompts(dataset, form, names[part]) for part, dataset in parts.items() if dataset is not None
    }
    return replace(data, **formatted)


def format_prompts(
    dataset: Dataset | IterableDataset, form: PromptFormat, name: str = "dataset"
) -> Dataset | IterableDataset:
    """
    Return the dataset with the column `prompt`, and with `solution` where answers are asked for.

    All columns stay, for the reward functions to read, but for those read here under names that these are given by the
    trainer. An answer is added as `solution` unless there is such a column.
    """
    first = next(iter(dataset), None)
    if first is None:
        return dataset
    prompt = _find(first, form.prompt_columns or ["prompt"], "prompt_column", name)
    answer = _find(first, form.answer_columns, "answer_column", name) if form.answer_columns else None
    if form.template is not None:
        _check_template(form.template, first)
    adds_solution = answer is not None and "solution" not in first
    read = GIVEN_TO_REWARDS & {prompt, answer}
    if not form.forms_prompts and not adds_solution:
        return dataset

    def formatted(row: Mapping[str, Any]) -> dict[str, Any]:
        columns = {"prompt": _form_prompt(_get(row, prompt), row, form)}
        return {**columns, "solution": _as_answer(_get(row, answer))} if adds_solution else columns

    return dataset.map(formatted, remove_columns=sorted(read))


def is_chat(dataset: Dataset | IterableDataset | None) -> bool:
    """Tell whether the first prompt is a list of messages; not so of an empty dataset or of none."""
    first: dict[str, Any] = next(iter(dataset), {}) if dataset is not None else {}
    prompt = first.get("prompt")
    return isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt)


def prompt_lines(data: Data, processing_class: Any, model: str, flags: BAPOScriptArguments) -> list[str]:
    """Return what the terminal says of the prompts, and of answers and forms that may not be what was meant."""
    if data.train is None:
        other_form = other_form_line(model, flags)
        return [prompts_line(data.test, processing_class), *([] if other_form is None else [other_form])]
    lines = [prompts_line(data.train, processing_class)]
    missing, unread = count_missing_answers(data.train), unread_answer(data.train, flags.answer_column)
    if missing:
        lines.append(
            f"Note: {missing} of {len(data.train)} prompts have no `solution`: a reward that reads it gives none."
        )
    if unread is not None:
        lines.append(
            f"Note: rewards read the data's own column `solution`, not `{unread}`: rename it if that is wrong."
        )
    return lines


def prompts_line(dataset: Dataset | IterableDataset, processing_class: Any) -> str:
    """Return what the terminal says of the prompts: whether the model gets messages, and whether it expects some."""
    if is_chat(dataset):
        return "Prompts: chat messages"
    expects_chat = getattr(processing_class, "chat_template", None) is not None
    return f"Prompts: {TEXT_FOR_CHAT if expects_chat else 'plain text'}"


def other_form_line(model: str, flags: Any) -> str | None:
    """Return what the terminal says of a saved model if its run had another template or system prompt, else `None`."""
    try:
        trained = read_settings(Path(model))
    except InputError as error:
        return f"Note: {error}"
    other = [
        f"`{name}` {trained[name]!r}, now {getattr(flags, name)!r}"
        for name in ("prompt_template", "system_prompt")
        if name in trained and trained[name] != getattr(flags, name)
    ]
    return f"Note: {model} was trained on prompts of another form: {'; '.join(other)}." if other else None


def count_missing_answers(dataset: Dataset | IterableDataset) -> int:
    """Count the rows whose `solution` is missing; 0 without such a column, and for a stream."""
    if isinstance(dataset, IterableDataset) or "solution" not in dataset.column_names:
        return 0
    return sum(not gold_texts(answer) for answer in dataset["solution"])


def unread_answer(dataset: Dataset | IterableDataset, columns: Sequence[str] | None) -> str | None:
    """Return the column of answers that was asked for, where `solution`, which rewards read, has something else."""
    first: dict[str, Any] = next(iter(dataset), {})
    if not columns or "solution" not in first:
        return None
    column = _find(first, columns, "answer_column", "dataset")
    return None if _as_answer(_get(first, column)) == first["solution"] else column


def check_chat_template(
    dataset: Dataset | IterableDataset | None, processing_class: Any, template_kwargs: Any = None
) -> None:
    """Refuse prompts that are chat messages for a tokenizer without a chat template for them (`InputError`)."""
    if not is_chat(dataset):
        return
    if not getattr(processing_class, "chat_template", None):
        raise InputError(
            "The prompts are chat messages, but the tokenizer of `model_name_or_path` has no chat template: take a "
            "model with one (an instruct model), put a `chat_template.jinja` into the model's folder, or give prompts "
            "that are text (`prompt_column`)."
        )
    if hasattr(processing_class, "tokenizer"):  # a processor, whose messages the trainer rewrites
        return
    try:
        processing_class.apply_chat_template(next(iter(dataset))["prompt"], tokenize=False, **(template_kwargs or {}))
    except TemplateError as error:
        raise InputError(
            f"The model's chat template does not take the first prompt ({error}). If it knows no system role, leave "
            "out `system_prompt` and write its text into `prompt_template`, or leave out the data's system messages."
        ) from error


def _find(row: Mapping[str, Any], columns: Sequence[str], flag: str, name: str) -> str:
    for column in columns:
        try:
            _get(row, column)
        except KeyError:
            continue
        return column
    named = " or ".join(f"`{column}`" for column in columns)
    raise InputError(f"The {name} has no {named} column, only {_names(row)}: set `--{flag}` to one of them.")


def _names(row: Mapping[str, Any]) -> list[str]:
    fields = [f"{name}.{field}" for name, value in row.items() if isinstance(value, dict) for field in value]
    return [*row, *fields]


def _get(row: Mapping[str, Any], column: str) -> Any:
    if column in row:
        return row[column]
    name, _, field = column.partition(".")
    if not field or not isinstance(row.get(name), dict):
        raise KeyError(column)
    return _get(row[name], field)


def _check_template(template: str, row: Mapping[str, Any]) -> None:
    if not any(f"{{{name}}}" in template for name in ("prompt", *row)):
        raise InputError(
            f"`prompt_template` is {template!r}, which has no place for the prompt: write {{prompt}} there, or the "
            f"name of a column in braces ({', '.join(row)})."
        )


def _fill(template: str, prompt: str, row: Mapping[str, Any]) -> str:
    values = {**row, "prompt": prompt}
    names = "|".join(map(re.escape, values))

    def value(place: re.Match) -> str:
        if values[place[1]] is None:
            raise InputError(f"`prompt_template` takes `{place[1]}`, which the row of the prompt {prompt!r} lacks.")
        return str(values[place[1]])

    return re.sub(rf"\{{({names})\}}", value, template)


def _form_prompt(prompt: Any, row: Mapping[str, Any], form: PromptFormat) -> Any:
    if prompt is None or prompt == "":
        return None  # `check_prompts` refuses it
    if isinstance(prompt, list) and not is_prompt(prompt):
        return prompt  # so too
    if not isinstance(prompt, list):
        text = str(prompt) if form.template is None else _fill(form.template, str(prompt), row)
        if not form.makes_chats:
            return text
        messages: list[dict[str, Any]] = [{"role": "user", "content": text}]
    else:
        messages = [dict(message) for message in prompt]
        if form.template is not None:
            if not isinstance(messages[-1].get("content"), str):
                raise InputError(
                    f"`prompt_template` goes around the text of the last message, but a prompt ends with "
                    f"{start_of(messages[-1])}: leave `prompt_template` out."
                )
            messages[-1]["content"] = _fill(form.template, messages[-1]["content"], row)
    if form.system_prompt is None:
        return messages
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": form.system_prompt}, *others]


def _as_answer(value: Any) -> Any:
    """Return an answer as text if it is a number, and as it is if not: a column of the dataset has one type."""
    return next(iter(gold_texts(value)), None) if isinstance(value, int | float) else value
