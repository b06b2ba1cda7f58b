"""Columns become prompts and answers."""

import re

import pytest
from datasets import Dataset, IterableDataset

from bapo_trl.inputs.prompt_checks import check_prompts
from bapo_trl.script.prompts import (
    PromptFormat,
    check_chat_template,
    format_prompts,
    prompts_line,
    unread_answer,
)
from bapo_trl.tasks import character_tokenizer


AIME = {"question": r"Find $\{x\}$.", "answer": "073"}
SKYWORK = {
    "data_source": "train-math-deepscaler",
    "prompt": [{"content": "1+1?", "role": "user"}],
    "ability": "math",
    "reward_model": {"ground_truth": '["2"]', "style": "rule"},
    "extra_info": {"index": 0},
}


def formatted(row, **form):
    return format_prompts(Dataset.from_list([row]), PromptFormat(**form))[0]


def test_the_first_column_that_is_there_is_taken_all_stay_and_the_answer_is_a_solution_too():
    row = formatted(AIME, prompt_columns=["problem", "question", "answer"], answer_columns=["answer"])
    assert row == {**AIME, "prompt": AIME["question"], "solution": "073"}


def test_columns_that_rewards_could_not_be_given_go_if_they_are_read_here():
    row = {"prompts": "1+1?", "completions": "2", "level": 1}
    columns = {"prompt_columns": ["prompts"], "answer_columns": ["completions"]}
    assert formatted(row, **columns) == {"prompt": "1+1?", "solution": "2", "level": 1}
    assert formatted(row, prompt_columns=["prompts"])["completions"] == "2"


def test_a_solution_that_is_there_stays():
    row = {"problem": "1+1?", "solution": "It is 2.", "answer": 2}
    assert formatted(row, prompt_columns=["problem"], answer_columns=["answer"])["solution"] == "It is 2."
    assert formatted({"prompt": "1+1?", "answer": 2}, answer_columns=["answer"])["solution"] == "2"


def test_chats_with_a_field_as_the_answer():
    row = formatted(
        SKYWORK,
        answer_columns=["reward_model.ground_truth"],
        template="{prompt} Write \\boxed{}.",
        system_prompt="Add.",
    )
    assert row["prompt"] == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1+1? Write \\boxed{}."},
    ]
    assert row["solution"] == '["2"]'
    assert row["reward_model"] == SKYWORK["reward_model"]
    again = formatted({"prompt": row["prompt"]}, system_prompt="Count.")["prompt"]
    assert [message["content"] for message in again] == ["Count.", "1+1? Write \\boxed{}."]


def test_templates_fill_in_columns_once_and_leave_other_braces():
    row = formatted(
        {"prompt": "What is {answer}?", "answer": "{prompt}", "unit": "cm"},
        template=r"{prompt} In {unit}, in \boxed{}, {nothing}.",
    )
    assert row["prompt"] == r"What is {answer}? In cm, in \boxed{}, {nothing}."


def test_text_becomes_a_chat_only_where_prompts_are_formed():
    form = PromptFormat(answer_columns=["answer"])
    assert not form.with_chats_if(has_chat_template=True).makes_chats
    assert formatted({"prompt": "1+1?"}, template="{prompt}", makes_chats=True)["prompt"] == [
        {"role": "user", "content": "1+1?"}
    ]
    assert not PromptFormat(template="{prompt}").with_chats_if(has_chat_template=False).makes_chats


@pytest.mark.parametrize("prompt", [[{"from": "human", "value": "1+1?"}], ["1+1?"], []])
def test_what_is_no_prompt_stays_to_be_refused_by_its_row(prompt):
    rows = Dataset.from_list([{"prompt": prompt, "unit": "cm"}])
    for form in (PromptFormat(template="{prompt} In {unit}."), PromptFormat(system_prompt="Add.")):
        with pytest.raises(ValueError, match=re.escape(f"that of row 0 is {prompt!r}.")):
            check_prompts(format_prompts(rows, form), None)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "1+1?", "unit": None},
            r"`prompt_template` takes `unit`, which the row of the prompt '1\+1\?' lacks",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "text", "text": "1+1?"}]}], "unit": "cm"},
            "`prompt_template` goes around the text of the last message, but a prompt ends with",
        ),
    ],
)
def test_a_template_without_what_it_takes_is_refused(row, message):
    with pytest.raises(ValueError, match=message):
        formatted(row, template="{prompt} In {unit}.")


def test_an_answer_that_rewards_do_not_read_is_told_of():
    both = {"prompt": "1+1?", "solution": "It is 2.", "answer": "2"}
    for row, columns, unread in (
        (both, ["answer"], "answer"), (both, ["solution"], None), (both, None, None),
        ({**both, "solution": "2"}, ["answer"], None), ({"prompt": "1+1?", "answer": "2"}, ["answer"], None),
    ):  # fmt: skip
        rows = format_prompts(Dataset.from_list([row]), PromptFormat(answer_columns=columns))
        assert unread_answer(rows, columns) == unread


def test_streams():
    stream = IterableDataset.from_generator(lambda: iter([AIME]))
    (row,) = format_prompts(stream, PromptFormat(["question"], ["answer"]))
    assert (row["prompt"], row["solution"]) == (AIME["question"], "073")
    empty = IterableDataset.from_generator(lambda: iter(()))
    assert format_prompts(empty, PromptFormat(["question"])) is empty


@pytest.mark.parametrize(
    ("row", "form", "message"),
    [
        (
            SKYWORK,
            {"answer_columns": ["ability.text", "reward_model.truth"]},
            r"The train dataset has no `ability.text` or `reward_model.truth` column, only "
            r".*'reward_model.ground_truth'.*: set `--answer_column`",
        ),
        (
            AIME,
            {"prompt_columns": ["question"], "template": "{problem}?"},
            r"`prompt_template` is '\{problem\}\?', which has no place for the prompt: .*\(question, answer\)",
        ),
    ],
)
def test_what_is_not_there_is_named_with_what_is(row, form, message):
    with pytest.raises(ValueError, match=message):
        format_prompts(Dataset.from_list([row]), PromptFormat(**form), "train dataset")


def test_a_line_says_what_the_model_gets_and_whether_it_expects_messages():
    tokenizer, text = character_tokenizer(), Dataset.from_list([{"prompt": "1+1?"}])
    assert prompts_line(text, tokenizer) == "Prompts: plain text"
    tokenizer.chat_template = "{{ messages }}"
    assert prompts_line(Dataset.from_list([SKYWORK]), tokenizer) == "Prompts: chat messages"
    assert "has a chat template: `--prompt_column prompt` makes" in prompts_line(text, tokenizer)


def test_chats_need_a_chat_template_that_takes_them():
    tokenizer = character_tokenizer()
    chats = Dataset.from_list([SKYWORK])
    check_chat_template(Dataset.from_list([{"prompt": "1+1?"}]), tokenizer)
    check_chat_template(None, tokenizer)
    tokenizer.chat_template = "{{ messages }}"
    check_chat_template(chats, tokenizer)
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(
        ValueError, match=r"not take the first prompt \(System role not supported\).*`prompt_template`"
    ):
        check_chat_template(chats, tokenizer)
