"""Columns become prompts and answers."""

import pytest
from datasets import Dataset

from bapo_trl.script.data.columns import format_data, format_prompts
from bapo_trl.script.data.load import Data
from bapo_trl.script.data.prompts import check_chat_template
from bapo_trl.script.settings.arguments import BAPOScriptArguments
from bapo_trl.tasks import character_tokenizer
from tests.helpers.script_runs import chat_tokenizer


AIME = {"question": r"Find $\{x\}$.", "answer": "073"}
SKYWORK = {
    "data_source": "train-math-deepscaler",
    "prompt": [{"content": "1+1?", "role": "user"}],
    "ability": "math",
    "reward_model": {"ground_truth": '["2"]', "style": "rule"},
    "extra_info": {"index": 0},
}


def formatted(row, makes_chats=False, **flags):
    return format_prompts(Dataset.from_list([row]), BAPOScriptArguments(**flags), makes_chats)[0]


def test_the_first_column_that_is_there_is_taken_all_stay_and_the_answer_is_a_solution_too():
    row = formatted(AIME, prompt_column=["problem", "question", "answer"], answer_column=["answer"])
    assert row == {**AIME, "prompt": AIME["question"], "solution": "073"}


def test_a_solution_that_is_there_stays():
    row = {"problem": "1+1?", "solution": "It is 2.", "answer": 2}
    assert formatted(row, prompt_column=["problem"], answer_column=["answer"])["solution"] == "It is 2."
    assert formatted({"prompt": "1+1?", "answer": 2}, answer_column=["answer"])["solution"] == "2"


def test_chats_with_a_field_as_the_answer():
    row = formatted(
        SKYWORK,
        answer_column=["reward_model.ground_truth"],
        prompt_template="{prompt} Write \\boxed{}.",
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
        prompt_template=r"{prompt} In {unit}, in \boxed{}, {nothing}.",
    )
    assert row["prompt"] == r"What is {answer}? In cm, in \boxed{}, {nothing}."


@pytest.mark.parametrize(
    ("flags", "has_template", "prompt"),
    [
        ({"answer_column": ["answer"]}, True, "1+1?"),
        ({"prompt_column": ["prompt"]}, True, [{"role": "user", "content": "1+1?"}]),
        ({"prompt_template": "{prompt}"}, True, [{"role": "user", "content": "1+1?"}]),
        ({"prompt_template": "{prompt}"}, False, "1+1?"),
    ],
)
def test_text_becomes_a_chat_only_where_prompts_are_formed_for_a_chat_model(flags, has_template, prompt):
    rows = Dataset.from_list([{"prompt": "1+1?", "answer": "2"}])
    tokenizer = chat_tokenizer() if has_template else character_tokenizer()
    assert format_data(Data("sums", rows, None), BAPOScriptArguments(**flags), tokenizer).train[0]["prompt"] == prompt


IMAGE = [{"role": "user", "content": [{"type": "image"}]}]


@pytest.mark.parametrize(
    ("row", "flags", "message"),
    [
        ({"prompt": "1+1?", "unit": None}, {"prompt_template": "{prompt} In {unit}."},
         r"`prompt_template` names the column `unit`, which is empty for the prompt '1\+1\?'"),
        ({"prompt": IMAGE}, {"prompt_template": "{prompt}!"}, "`prompt_template` needs prompts of text"),
        (AIME, {"prompt_column": ["question"], "prompt_template": "{problem}?"},
         r"`prompt_template` is '\{problem\}\?', which has no placeholder for the prompt: .*\(question, answer\)"),
        (SKYWORK, {"answer_column": ["ability.text", "reward_model.truth"]},
         r"The dataset has no `ability.text` or `reward_model.truth` column, only "
         r".*'reward_model.ground_truth'.*: set `--answer_column`"),
    ],
)  # fmt: skip
def test_a_missing_column_raises_an_error_with_the_existing_ones(row, flags, message):
    with pytest.raises(ValueError, match=message):
        formatted(row, **flags)


def test_a_later_row_that_the_chat_template_rejects_is_named():
    user = {"role": "user", "content": "1+1?"}
    rows = Dataset.from_dict({"prompt": [[user], [user], [{"role": "system", "content": "Add."}, user]]})
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    with pytest.raises(ValueError, match=r"\(System role not supported\), first in row 2"):
        check_chat_template(rows, chat_tokenizer(template))
