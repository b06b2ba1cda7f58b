"""The prompt that takes most tokens, and reward functions called once."""

from datasets import Dataset

from bapo_trl.script.data.prompts import longest_prompt
from bapo_trl.script.plan import example_rewards
from bapo_trl.tasks import character_tokenizer


def test_the_longest_prompt_is_found():
    dataset = Dataset.from_dict({"prompt": ["1" * length for length in (3, 90, 5)]})
    for prompts in (dataset, dataset.to_iterable_dataset()):
        assert longest_prompt(prompts, character_tokenizer()) == (1, 90)


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
    found = example_rewards([of_columns, of_a_service], ROW, character_tokenizer())
    assert found.splitlines()[1:] == ["  of_columns: 1", "  of_a_service: none"]
