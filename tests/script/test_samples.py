"""Prompts as the model gets them, and reward functions called once."""

import asyncio

import pytest
from datasets import Dataset

from bapo_trl.script.plan import try_rewards
from bapo_trl.script.prompts import SAMPLED_PROMPTS, look_at_prompts
from bapo_trl.tasks import character_tokenizer
from tests.helpers.script_runs import chat_tokenizer


def test_lengths_of_prompts_are_quantiles_of_tokens():
    dataset = Dataset.from_dict({"prompt": ["1" * length for length in range(1, 101)]})
    prompts = look_at_prompts(dataset, character_tokenizer(), room=90)
    assert prompts.lengths == {0.05: 5, 0.5: 50, 0.95: 95, 1.0: 100}
    assert (prompts.too_long, prompts.num_prompts, prompts.num_sampled, prompts.first) == (10, 100, 100, "1")
    assert not prompts.lacks_messages
    assert look_at_prompts(dataset, character_tokenizer(), room=None).too_long == 0


def test_messages_go_through_the_chat_template():
    dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": "12"}]] * 3})
    prompts = look_at_prompts(dataset, chat_tokenizer(), room=None)
    assert (prompts.first, prompts.lacks_messages) == ("<u>12<a>", False)


def test_some_of_many_prompts_are_checked_and_the_first_of_a_stream():
    many = Dataset.from_dict({"prompt": ["1"] * (2 * SAMPLED_PROMPTS) + ["1234"] * (2 * SAMPLED_PROMPTS)})
    prompts = look_at_prompts(many, character_tokenizer(), room=None)
    assert (prompts.num_prompts, prompts.num_sampled) == (4 * SAMPLED_PROMPTS, SAMPLED_PROMPTS)
    assert (prompts.lengths[0.5], prompts.lengths[0.95]) == (1, 4)
    stream = look_at_prompts(many.to_iterable_dataset(), character_tokenizer(), room=None)
    assert (stream.num_prompts, stream.num_sampled, stream.lengths[1.0]) == (None, SAMPLED_PROMPTS, 1)


ROW = {"prompt": "1+1=", "solution": "2", "level": 3}


def of_columns(prompts, completions, completion_ids, solution, level, trainer_state, log_extra, log_metric):
    log_extra("level", level)
    log_metric("mean", 1.0)
    assert (prompts, solution, level, trainer_state.global_step) == (["1+1="] * 2, ["2"] * 2, [3] * 2, 0)
    assert character_tokenizer().decode(completion_ids[0]) == completions[0]
    return [float(solution[0] in completion) for completion in completions]


async def of_a_service(completions, **kwargs):
    return [None] * len(completions)


def test_each_reward_function_is_called_as_the_trainer_calls_it():
    found = try_rewards([of_columns, of_a_service], ROW, character_tokenizer())
    assert [(each.name, each.value, each.error) for each in found] == [
        ("of_columns", 1.0, None),
        ("of_a_service", None, None),
    ]


@pytest.mark.parametrize("solution", [None, "2"])
def test_a_made_completion_has_the_form_of_the_prompts(solution):
    def content(completions, **kwargs):
        assert completions[0][0]["role"] == "assistant"
        return [float("boxed{2}" in messages[0]["content"]) for messages in completions]

    row = {"prompt": [{"role": "user", "content": "1+1="}], "solution": solution}
    (found,) = try_rewards([content], row, chat_tokenizer())
    assert found.value == float(solution is not None)


def test_a_function_that_waits_is_tried_within_a_loop_that_runs_already():
    async def in_a_notebook():
        return try_rewards([of_a_service], ROW, character_tokenizer())

    (found,) = asyncio.run(in_a_notebook())
    assert found.error is None
