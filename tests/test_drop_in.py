"""Set-ups that `GRPOTrainer` trains: `BAPOTrainer` trains each of them as well, whatever it would have said of it."""

import math
from functools import partial
from pathlib import Path

import pytest
import trl
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from bapo_trl import BAPOConfig, BAPOTrainer
from bapo_trl.tasks import character_tokenizer
from tests.helpers.commands import succeeded
from tests.helpers.forked import run_function
from tests.helpers.ranks import finish, read_ranks
from tests.helpers.rollouts import multi_turn
from tests.helpers.toy import digits_reward, toy_dataset, toy_run, toy_trainer


SMALL = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "steps_per_generation": 2, "num_iterations": 1,
    "num_generations": 2, "max_completion_length": 4, "gradient_checkpointing": False, "max_steps": 1,
}  # fmt: skip
TEXTS = [f"{number}+1=" for number in range(8)]


def dataset(made) -> dict:
    return {"trainer_args": {"train_dataset": made}}


def reward(make) -> dict:
    """A set-up whose reward function returns what `make` makes of a list of rewards."""

    def my_reward(completions, **kwargs):
        return make(digits_reward(completions))

    return {"reward_funcs": my_reward}


async def later(completions, **kwargs):
    return digits_reward(completions)


class Scorer:
    """A reward that is no function."""

    def __call__(self, completions, **kwargs):
        return digits_reward(completions)


def scaled(completions, scale, **kwargs):
    return [scale * value for value in digits_reward(completions)]


def without_pad_token() -> dict:
    made = character_tokenizer()
    made.pad_token = None
    return {"trainer_args": {"processing_class": made}}


def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: The first.
        b: The second.

    Returns:
        The sum.
    """
    return a + b


class Counter:
    """An environment that brings its prompts and gives its reward."""

    def reset(self, **kwargs) -> str:
        self.count = 0
        return "Count."

    def step(self) -> str:
        """
        Count one on.

        Returns:
            The count.
        """
        self.count += 1
        return str(self.count)

    def get_reward(self) -> float:
        return float(self.count)


def tools(**parts) -> dict:
    chat = character_tokenizer()
    chat.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    made = Dataset.from_list([{"prompt": [{"role": "user", "content": "1+2="}]}] * 8)
    return {
        "reward_funcs": brevity_of_all,
        "trainer_args": {"train_dataset": made, "processing_class": chat, **parts},
    }


def brevity_of_all(completions, **kwargs):
    return [-float(len(str(messages))) for messages in completions]


def rows(**columns) -> Dataset:
    return Dataset.from_dict({"prompt": TEXTS, **columns})


SET_UPS = {
    # Datasets
    "stream that knows its columns": lambda: dataset(rows().to_iterable_dataset()),
    "transform that makes the prompt": lambda: dataset(
        Dataset.from_dict({"n": TEXTS}).with_transform(lambda batch: {"prompt": batch["n"]})
    ),
    "pandas format": lambda: dataset(rows().with_format("pandas")),
    "torch format": lambda: dataset(rows(solution=[3.0] * 8).with_format("torch")),
    "unused columns removed": lambda: {**dataset(rows(other=[3] * 8)), "remove_unused_columns": True},
    "evaluation split named train": lambda: {
        "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4,
        "trainer_args": {"eval_dataset": {"train": toy_dataset(4), "eval": toy_dataset(2)}},
    },
    "prompts of very different length": lambda: dataset(Dataset.from_dict({"prompt": ["1", "1" * 300] * 4})),
    "as many prompts as a generation takes": lambda: dataset(Dataset.from_dict({"prompt": TEXTS[:4]})),
    # Rewards
    "truth values": lambda: reward(lambda values: [value > 0.5 for value in values]),
    "1e19": lambda: reward(lambda values: [0.0, 1e19] * (len(values) // 2)),
    "equal ones of 1e30": lambda: reward(lambda values: [1e30] * len(values)),
    "only None": lambda: reward(lambda values: [None] * len(values)),
    "NaN": lambda: reward(lambda values: [math.nan, *values[1:]]),
    "asynchronous": lambda: {"reward_funcs": [later, digits_reward]},
    "object and partial": lambda: {"reward_funcs": [Scorer(), partial(scaled, scale=2.0)]},
    # Tokenizers
    "no pad token": without_pad_token,
    # Configs
    "evaluation that never comes": lambda: {
        "do_eval": True, "per_device_eval_batch_size": 3, "trainer_args": {"eval_dataset": toy_dataset(2)},
    },
    # Rollouts
    "tools": lambda: tools(tools=[add]),
    "environment": lambda: tools(environment_factory=Counter),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SET_UPS)
def test_what_grpo_trains_this_trains(tmp_path, name):
    trainer = toy_run(tmp_path, **{**SMALL, **SET_UPS[name]()})
    assert trainer.state.global_step == 1


def train_both_on_a_rank(folder: str) -> None:
    """Write the updates of GRPOTrainer and of BAPOTrainer, and how often each sampled."""
    num_turns = 0
    before = GRPOTrainer._generate_single_turn

    def silent_at_times(self, *args):
        nonlocal num_turns
        num_turns += 1
        said, logps = before(self, *args)
        return [[], *said[1:]], logps

    GRPOTrainer._generate_single_turn = silent_at_times
    results = {}
    for trainer_class, config_class in ((GRPOTrainer, GRPOConfig), (BAPOTrainer, BAPOConfig)):
        trainer = toy_trainer(
            f"{folder}/out", None, trainer_class, config_class, {"rollout_func": multi_turn}, **SMALL
        )
        num_turns = 0
        trainer.train()
        results[trainer_class.__name__] = {"updates": trainer.state.global_step, "turns": num_turns}
    finish(trainer, folder, **results)


@pytest.mark.processes
def test_turns_of_different_number_on_each_rank(tmp_path):
    succeeded(run_function(train_both_on_a_rank, tmp_path, ranks=2, timeout_s=180))
    for rank, turns in zip(read_ranks(tmp_path), (2, 4), strict=True):
        assert rank["GRPOTrainer"] == rank["BAPOTrainer"] == {"updates": 1, "turns": turns}
