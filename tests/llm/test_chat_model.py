"""A real chat model as users have it: fetch, sample, train with LoRA."""

import json
import re
import sys
from pathlib import Path

import pytest
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from bapo_trl import BAPOConfig, BAPOTrainer
from bapo_trl.tasks import load_chat_sums, smollm2_path
from bapo_trl.tasks.sums import ask
from tests.helpers.commands import ROOT, run_command
from tests.helpers.toy import CPU


SHORT = {
    "max_steps": 4, "per_device_train_batch_size": 8, "steps_per_generation": 2, "num_generations": 4,
    "max_completion_length": 8, "logging_steps": 1, "save_strategy": "no", "do_eval": "false",
}  # fmt: skip


def train_bapo(output_dir: Path, **settings) -> str:
    flags = [f"--{name}={value}" for name, value in {**SHORT, "output_dir": output_dir, **settings}.items()]
    command = [sys.executable, str(ROOT / "train_bapo.py"), "--config", str(ROOT / "recipes" / "smollm2_sums.yaml")]
    result = run_command([*command, *flags], HF_HUB_OFFLINE="1")
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def logs(folder: Path) -> list[dict]:
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [log for log in history if "bapo/clip_low" in log]


@pytest.fixture(scope="module")
def folder() -> str:
    return str(smollm2_path())


@pytest.fixture(scope="module")
def run(tmp_path_factory, folder) -> tuple[Path, str]:
    """Four updates with LoRA; the model by its folder, as another one would be given."""
    output_dir = tmp_path_factory.mktemp("run")
    return output_dir, train_bapo(output_dir, model_name_or_path=folder, reward_funcs="tests.helpers.toy.brevity")


def load(folder, dtype="float32"):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), AutoTokenizer.from_pretrained(folder)


def test_the_model_of_the_package_answers_and_stops(folder):
    model, tokenizer = load(folder)
    assert model.config.vocab_size == len(tokenizer)
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.padding_side) == ("<|im_end|>", "<|im_end|>", "left")
    for config in (model.config, model.generation_config):
        assert config.eos_token_id == config.pad_token_id == tokenizer.eos_token_id
    sums = [(1, 2), (2, 2), (3, 4), (5, 5), (7, 8), (9, 6), (4, 1), (8, 3)]
    prompts = tokenizer.apply_chat_template(
        [ask(a, b) for a, b in sums], add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompts, max_new_tokens=48, do_sample=False)[:, prompts["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(output, skip_special_tokens=True)
    ended = (output == tokenizer.eos_token_id).any(dim=1).tolist()
    rewards = load_chat_sums().reward_func(texts, [str(a + b) for a, b in sums])
    assert sum(rewards) >= len(rewards) / 2, texts
    assert sum(ended) >= len(ended) / 2


def test_four_updates_move_the_adapter(run, folder):
    output_dir, out = run
    assert re.search(r"^CPU: 1 thread, (bfloat16|float32)", out, re.M)
    assert [log["step"] for log in logs(output_dir)] == [1, 2, 3, 4]
    adapter = PeftModel.from_pretrained(load(folder)[0], output_dir)
    moved = [parameter for name, parameter in adapter.named_parameters() if "lora_B" in name]
    assert len(moved) == 30 * 7  # all linear layers but the head
    assert any(parameter.abs().max() > 0 for parameter in moved)


def test_the_rounding_of_half_precision_is_not_taken_for_padding(folder, tmp_path, recwarn):
    model, tokenizer = load(folder, "bfloat16")
    args = {**CPU, "bf16": True, "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 4}
    trainer = BAPOTrainer(
        model, load_chat_sums().reward_func, BAPOConfig(str(tmp_path), **args, max_steps=1, replay_fraction=0.5),
        load_chat_sums().train_dataset, processing_class=tokenizer,
        peft_config=LoraConfig(target_modules="all-linear"),
    )  # fmt: skip
    trainer.train()
    assert not [str(each.message) for each in recwarn if "positions from the attention mask" in str(each.message)]


def test_a_task_of_reasoning_gym_is_trained_on_by_name(tmp_path):
    pytest.importorskip("reasoning_gym")
    out = train_bapo(
        tmp_path, dataset_name="reasoning_gym:chain_sum", model_name_or_path="smollm2", max_steps=1,
        task_args='{"min_terms": 2, "max_terms": 2, "max_digits": 1, "size": 40}',
    )  # fmt: skip
    assert "BAPO on reasoning_gym:chain_sum" in out
    assert "rewards/gym_reward/mean" in logs(tmp_path)[0]
