"""Unusable data, tokenizers and reward functions: an error names the problem before the first update."""

import asyncio
import math
import re
import traceback
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import PartialState
from datasets import Dataset, IterableDataset
from PIL import Image
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)
from trl import GRPOConfig, GRPOTrainer

from bapo_trl import BAPOConfig, BAPOTrainer
from bapo_trl.errors import InputError
from bapo_trl.script.data.prompts import check_fit, check_prompts, check_tokenizer
from bapo_trl.tasks import character_tokenizer
from bapo_trl.upstream.fixes import end_training
from tests.helpers.alike import assert_same_tensors, weights_of
from tests.helpers.forked import run_function
from tests.helpers.script_runs import CHAT_TEMPLATE
from tests.helpers.toy import (
    brevity,
    digits_reward,
    opt_model,
    toy_dataset,
    toy_model,
    toy_run,
    toy_trainer,
    training_logs,
)  # fmt: skip


SUMS = toy_dataset()["prompt"]
USER = [{"role": "user", "content": "1+2="}]
BARE = {"role": "assistant", "content": None}


def stream(*prompts) -> IterableDataset:
    return IterableDataset.from_generator(lambda: ({"prompt": prompt} for prompt in prompts))


def stopped(trainer, error: type, message: str) -> None:
    """Train, and check that the error is raised before the first update."""
    before = weights_of(trainer.model)
    with pytest.raises(error, match=message):
        trainer.train()
    assert trainer.state.global_step == 0
    assert_same_tensors(before, trainer.model.state_dict())


# Prompts


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([*SUMS, ""], "1 of the 41 prompts of the train dataset cannot be used: the prompt of row 40 is ''"),
        ([None, *SUMS], "1 of the 41 prompts .* row 0 is None"),
        ([USER] * 10 + [[]], r"1 of the 11 prompts .* row 10 is \[\]"),
        (list(range(10)), "10 of the 10 prompts .* row 0 is 0.*Use text, or a list of messages"),
        ([["1+2=", "1+3="]] * 10, r"row 0 is \['1\+2=', '1\+3='\]"),
        ([USER] * 8 + [[*USER, BARE]], "1 of the 9 prompts .* row 8 is .{3}role': 'user'"),
    ],
)
def test_an_invalid_prompt_raises_an_error_with_its_row(prompts, message):
    dataset = Dataset.from_dict({"prompt": prompts})
    with pytest.raises(InputError, match=message):
        check_prompts(dataset, "train")


@pytest.mark.trainings
def test_a_stream_that_ends_before_a_generation_is_no_success(tmp_path):
    for prompts in ([], SUMS[:7]):
        trainer = toy_trainer(tmp_path, trainer_args={"train_dataset": stream(*prompts)})
        stopped(trainer, ValueError, "No update was made: the dataset ended before it filled one generation of 24")


def check(trainer) -> None:
    """Check the data of a trainer as the command line does."""
    datasets = {"train": trainer.train_dataset, "eval": trainer.eval_dataset}
    check_fit(trainer.model.config, trainer.processing_class, trainer.args, datasets)


def rejected(folder, model, message: str, **settings) -> None:
    with pytest.raises(InputError, match=message):
        check(toy_trainer(folder, model, **settings))


TOO_LONG = (
    r"A prompt of the train dataset is too long: row 41 has 61 tokens, which leaves less than "
    r"`max_completion_length` 7 of the model's window of 64"
)


@pytest.mark.trainings
def test_prompts_that_do_not_fit_into_the_window(tmp_path):
    # 64 positions, of which a completion may take 7
    fits = {"train_dataset": Dataset.from_dict({"prompt": ["1" * 57] * 8})}
    assert toy_trainer(tmp_path, opt_model(), trainer_args=fits, max_steps=1).train().global_step == 1
    dataset = Dataset.from_dict({"prompt": [*SUMS, "1" * 58, "1" * 61, "1" * 57]})
    tokenizer = character_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE  # <u> before a message and <a> at the end
    chats = [[{"role": "user", "content": "1" * length}] for length in (*range(1, 12), 52)]
    chat = {"processing_class": tokenizer, "train_dataset": Dataset.from_dict({"prompt": chats})}
    for parts, settings, message in (
        ({"train_dataset": dataset}, {}, TOO_LONG),
        ({"eval_dataset": dataset}, {}, "A prompt of the eval dataset is too long"),
        (chat, {}, r"row 11 has 58 tokens"),
        ({}, {"max_completion_length": 64}, "`max_completion_length` 64 of the model's window of 64"),
    ):
        rejected(tmp_path, opt_model(), message, trainer_args=parts, **settings)
    trainer = toy_trainer(tmp_path, toy_model(max_position_embeddings=64), trainer_args={"train_dataset": dataset})
    with pytest.warns(UserWarning, match=TOO_LONG):  # rotary positions go on
        check(trainer)


# Files


IMAGES_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endfor %}"
)


def vision_parts():
    """A small model that takes images, and its processor."""
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    size = {"height": 8, "width": 8}
    processor = LlavaProcessor(
        CLIPImageProcessorPil(size=size, crop_size=size), tokenizer, chat_template=IMAGES_TEMPLATE, patch_size=4,
        vision_feature_select_strategy="default", num_additional_image_tokens=1,
    )  # fmt: skip
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4,
    )  # fmt: skip
    text = toy_model(vocab_size=len(tokenizer)).config
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=processor.image_token_id)
    return LlavaForConditionalGeneration(config), processor


def rows_with_images(kind: str, every: int) -> Dataset:
    """Prompts of which every second, say, has an image."""
    image = Image.new("RGB", (8, 8))
    chats = [[{"role": "user", "content": f"{number}+1="}] for number in range(24)]
    has_image = [number % every == 0 for number in range(24)]
    of_rows = {
        "image": [image if has_one else None for has_one in has_image],
        "images": [[image] if has_one else [] for has_one in has_image],
    }
    return Dataset.from_dict({"prompt": chats, kind: of_rows[kind]})


@pytest.mark.trainings
@pytest.mark.parametrize("kind", ["image", "images"])
def test_images_of_some_rows_are_rejected_where_trl_would_fail(tmp_path, kind):
    def run(trainer_class, config_class, every, **settings):
        model, processor = vision_parts()
        data = {"train_dataset": rows_with_images(kind, every), "processing_class": processor}
        toy_run(
            tmp_path, model, trainer_class, config_class, data, reward_funcs=brevity, max_steps=2,
            shuffle_dataset=False, **settings,
        )  # fmt: skip

    run(BAPOTrainer, BAPOConfig, 1)
    one_prompt = {"per_device_train_batch_size": 3, "steps_per_generation": 1, "gradient_accumulation_steps": 1}
    run(BAPOTrainer, BAPOConfig, 2, **one_prompt)
    with pytest.raises(TypeError, match="only a single or a list of entries"):
        run(GRPOTrainer, GRPOConfig, 2)
    with pytest.raises(ValueError, match=r"Only some prompts .*'0\+1=.* has one, and .*'1\+1=.* has none.*blank"):
        run(BAPOTrainer, BAPOConfig, 2)


# Tokenizers


@pytest.mark.trainings
def test_tokenizers_that_do_not_suit(tmp_path):
    tokenizer = character_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(InputError, match=r"tokenizer has no `eos_token`.*set `tokenizer\.eos_token`"):
        check_tokenizer(tokenizer)
    message = r"tokenizer has token ids up to 257, but the model's `vocab_size` is 257: .*resize_token_embeddings"
    rejected(tmp_path, toy_model(vocab_size=257), message)
    # Tokens that were added, as for images in models of text alone, do no harm where no prompt has them
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(["<image>"])
    trainer = toy_trainer(tmp_path, trainer_args={"processing_class": tokenizer}, max_steps=1)
    check(trainer)
    assert trainer.train().global_step == 1


# Rewards


def giving(make):
    def my_reward(completions, **kwargs):
        return make(digits_reward(completions))

    return my_reward


def one(value):
    """Return a reward function that gives sample 3 a special value."""
    return giving(lambda rewards: [*rewards[:3], value, *rewards[4:]])


def as_async(function):
    async def my_reward(**kwargs):
        await asyncio.sleep(0)
        return function(**kwargs)

    return my_reward


FIX = ".*return a finite number.*or None where the function does not apply"
UNUSABLE = [
    (one(math.inf), rf"returned inf for sample 3 of 24, prompt '\d+\+\d+=', completion {FIX}"),
    (giving(lambda rewards: torch.tensor([math.inf, *rewards[1:]])), r"returned inf for sample 0 of 24"),
    # What TRL would read numbers of: 24 keys, in any order, and 24 bytes
    (giving(lambda rewards: dict.fromkeys(range(24), 0.5)), "returned {0: 0.5, .*, a dict, for 24 samples.*in a list"),
    (giving(lambda rewards: set(range(24))), "returned {0, 1, .*, a set, for 24 samples"),
    (giving(lambda rewards: b"01" * 12), "returned .*, a bytes, for 24 samples"),
    # What TRL makes no rewards of
    (one("0.5"), f"returned .*, a list, for 24 samples, which torch cannot convert to numbers {FIX}"),
    (giving(lambda rewards: None), "returned None, a NoneType, for 24 samples.*in a list"),
    (giving(lambda rewards: rewards[:1]), f"returned 1 rewards for 24 samples{FIX}"),
    (giving(lambda rewards: np.array(0.5)), r"returned array\(0.5\), a ndarray, for 24 samples"),
    (giving(lambda rewards: [[reward] for reward in rewards]), r"returned 24 rewards .* of shape \(24, 1\)"),
    (giving(lambda rewards: iter("x" * 24)), "returned .'x', .*, a list, for 24 samples"),
]
# What TRL takes for the same rewards
SAME_REWARDS = [
    tuple, iter, np.array, torch.tensor, lambda rewards: np.array(rewards, dtype=object),
    lambda rewards: torch.tensor(rewards, requires_grad=True), lambda rewards: torch.tensor(rewards)[:, None],
    lambda rewards: [torch.tensor([reward]) for reward in rewards], lambda rewards: map(np.float32, rewards),
]  # fmt: skip


@pytest.mark.trainings
@pytest.mark.parametrize(
    ("reward", "message"),
    [*UNUSABLE, (as_async(one(math.inf)), UNUSABLE[0][1]), (as_async(giving(set)), "returned .*, a set, for 24")],
)
def test_an_invalid_reward_raises_an_error_with_function_and_value(tmp_path, reward, message):
    functions = [digits_reward, reward]
    trainer = toy_trainer(tmp_path, reward_funcs=functions)
    stopped(trainer, InputError, f"The reward function `my_reward` {message}")
    assert trainer.reward_funcs == functions


@pytest.mark.trainings
def test_rewards_in_any_form_that_trl_reads_are_the_same_rewards(tmp_path):
    means = []

    def my_reward(completions, **kwargs):
        rewards = digits_reward(completions)
        means.append(sum(rewards) / len(rewards))
        return SAME_REWARDS[len(means) - 1](rewards)

    one_update = {"steps_per_generation": 2, "num_iterations": 1}
    trainer = toy_trainer(tmp_path, reward_funcs=my_reward, max_steps=len(SAME_REWARDS), **one_update)
    trainer.train()
    assert [log["rewards/my_reward/mean"] for log in training_logs(trainer)] == pytest.approx(means, abs=1e-6)


STALE = {
    "num_iterations": 1, "replay_fraction": 0.5, "partial_rollout_oversampling": 1.5,
    "partial_rollout_chunk_length": 2,
}  # fmt: skip


def fail_on_a_rank(folder: str, fault: str) -> None:
    """Write what each rank raised, and at which update, to FOLDER/RANK.txt."""
    rank = resume = None

    def only_rank_1(completions, **kwargs):
        rewards = digits_reward(completions)
        if rank == 1 and fault == "reward raises":
            raise KeyError("mine")
        return [math.inf, *rewards[1:]] if rank == 1 else rewards

    class BreaksGradient(BAPOTrainer):
        """Of the second update, on rank 1."""

        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            if self.state.global_step == 1 and rank == 1:
                loss.register_hook(lambda gradient: gradient * math.nan)
            return loss

    parts, settings = {}, {"shuffle_dataset": False, "gradient_checkpointing": False}
    if fault.startswith("reward"):
        settings["reward_funcs"] = only_rank_1
    elif fault == "gradient":
        settings["trainer_class"] = BreaksGradient
    elif fault == "row":  # with a value that no checkpoint could keep
        settings |= STALE
        parts["train_dataset"] = toy_dataset().with_transform(
            lambda rows: {**rows, "when": [datetime(2026, 11, 23) if rank == 1 else "today"] * len(rows["prompt"])}
        )
    else:  # pool or queue: of its own, in a checkpoint
        settings |= STALE
        toy_trainer(Path(folder) / "out", **settings, max_steps=2, save_strategy="steps", save_steps=2).train()
        resume = f"{folder}/out/checkpoint-2"
    trainer = toy_trainer(Path(folder) / "out", trainer_args=parts, **settings)
    rank = PartialState().process_index
    assert trainer.accelerator.num_processes == 2
    if resume is not None and rank == 1:
        (file,) = Path(resume).glob(f"*_{fault}_00001_of_00002.safetensors")
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    try:
        trainer.train(resume_from_checkpoint=resume)
    except Exception as error:
        said = "".join(traceback.format_exception_only(error))
        (Path(folder) / f"{rank}.txt").write_text(
            f"{said}{type(trainer.model_wrapped).__name__} {trainer.state.global_step}"
        )
        if fault == "reward raises":  # of rank 1 alone
            raise
    end_training(trainer)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("fault", "ranks", "message"),
    [
        ("reward", (0, 1), "InputError: The reward function `only_rank_1` returned inf for sample 0 of 24, "),
        ("reward raises", (1,), "KeyError: 'mine'"),
        ("gradient", (0, 1), r"RuntimeError: .*in the gradient \(its norm is nan\) at update 2, before its"),
        ("row", (0, 1), "The column `when` has a datetime"),
        ("pool", (0, 1), r"rollout_pool_00001_of_00002\.safetensors is damaged"),
        ("queue", (0, 1), r"replay_queue_00001_of_00002\.safetensors is damaged"),
    ],
)
def test_an_error_on_one_rank_ends_the_run(tmp_path, fault, ranks, message):
    result = run_function(fail_on_a_rank, tmp_path, fault, ranks=2, timeout_s=120)
    is_of_one = len(ranks) == 1
    assert (result.returncode != 0) == is_of_one, result.stdout + result.stderr
    for rank in ranks:
        said = (tmp_path / f"{rank}.txt").read_text()
        assert re.search(message, said), said
        assert not is_of_one or re.search(message, result.stderr)
    if fault in ("row", "pool", "queue"):  # rank 1 finds it, and the other says so
        other, own = ((tmp_path / f"{rank}.txt").read_text() for rank in ranks)
        assert other == own.replace("InputError: ", "InputError: On rank 1: ", 1)


# Completions
