"""The recipes for data sets of the Hub, each run with one command on a small local file of the same columns."""

import json

import pytest
from datasets import Dataset, DatasetDict

from bapo_trl.script.settings.parser import parse_arguments
from bapo_trl.script.settings.recipes import recipe_names
from tests.helpers.commands import ROOT
from tests.helpers.script_runs import CHAT_TEMPLATE, CPU, completions, fill_folder, results, train_bapo


TRAINING = {
    "per_device_train_batch_size": "4", "gradient_accumulation_steps": "1", "steps_per_generation": "2",
    "num_generations": "4",
}  # fmt: skip
AIME24 = [{"id": i, "problem": f"Find {i}.", "solution": rf"\boxed{{{i}}}", "url": ""} for i in range(2)]
AIME25 = [{"id": f"{i}", "problem": f"Find {i}.", "answer": f"{i}"} for i in range(2)]
OWN = [{"question": "Find 73.", "answer": "073"}]
GSM8K = [{"question": f"How many are {i}?", "answer": f"They are <<{i}={i}>>{i}.\n#### {i}"} for i in range(4)]
SKYWORK = [
    {
        "data_source": f"train-math-{source}",
        "prompt": [{"content": f"What is {i}/2?", "role": "user"}],
        "ability": "math",
        "reward_model": {"ground_truth": json.dumps([rf"\frac{{{i}}}{{2}}"]), "style": "rule"},
        "extra_info": {"index": i, "model_difficulty": {"DeepSeek-R1-Distill-Qwen-7B": 3}},
    }
    for i, source in enumerate(["deepscaler", "numinamath_olympiads"] * 3)
]


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    fill_folder(tmp_path, monkeypatch, CHAT_TEMPLATE)


def run_recipe(name, **settings):
    settings = {**CPU, "use_vllm": "false", **settings}
    flags = [part for flag, value in settings.items() for part in (f"--{flag}", str(value))]
    train_bapo.main(["--config", str(ROOT / "recipes" / f"{name}.yaml"), *flags])


def test_what_recipes_save_is_resumed_without_a_loss():
    for recipe in recipe_names():
        _, args, *_ = parse_arguments(["--config", recipe, "--use_cpu", "true", "--bf16", "false"])
        if args.do_train and args.save_strategy == "steps":
            assert args.save_steps % args.updates_per_generation == 0, recipe


@pytest.mark.parametrize(("recipe", "rows"), [("aime24", AIME24), ("aime25", AIME25), ("aime24", OWN)])
def test_aime(recipe, rows):
    Dataset.from_list(rows).to_json("aime.jsonl")
    run_recipe(recipe, eval_dataset="aime.jsonl")
    found = results()
    assert {"eval_avg@16", "eval_pass@16", "eval_maj@16"} < set(found)
    assert "eval_prompts_without_reward" not in found
    lines = completions()
    assert len(lines) == 16 * len(rows)
    content = rows[0].get("problem", rows[0].get("question"))
    message = f"{content}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."
    assert lines[0]["prompt"] == [{"role": "user", "content": message}]


def test_gsm8k(tmp_path):
    DatasetDict(train=Dataset.from_list(GSM8K), test=Dataset.from_list(GSM8K)).save_to_disk("gsm8k")
    run_recipe("gsm8k", dataset_name="gsm8k", merge_adapter="true", **TRAINING)
    assert {"before_avg@4", "eval_avg@4", "eval_pass@4"} < set(results())
    assert (tmp_path / "out" / "merged" / "model.safetensors").exists()
