"""Prompts as the model gets them, and reward functions called once."""

from datasets import Dataset

from bapo_trl.script.data.prompts import look_at_prompts
from bapo_trl.script.plan import try_rewards
from bapo_trl.tasks import character_tokenizer


def test_lengths_of_prompts_are_quantiles_of_tokens():
    dataset = Dataset.from_dict({"prompt": ["1" * length for length in range(1, 101)]})
    prompts = look_at_prompts(dataset, character_tokenizer(), room=90)
    assert prompts.lengths == {0.05: 5, 0.5: 50, 0.95: 95, 1.0: 100}
    assert (prompts.too_long, prompts.num_prompts, prompts.num_sampled, prompts.first) == (10, 100, 100, "1")
    assert not prompts.lacks_messages
    assert look_at_prompts(dataset, character_tokenizer(), room=None).too_long == 0


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
