"""`--dry_run true` through the front door: recipes, launchers, bad input; no weight is loaded, nothing is written."""

import re
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict
from transformers import PreTrainedModel, Qwen2Config

from bapo_trl import BAPOConfig, cli, dry_run
from bapo_trl.plan.memory import Layout
from bapo_trl.tasks import character_tokenizer
from tests.helpers.commands import ROOT
from tests.helpers.script_runs import CHAT_TEMPLATE, fill_folder, run
from tests.script.test_recipes import AIME24, GSM8K, SKYWORK


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    fill_folder(tmp_path, monkeypatch, CHAT_TEMPLATE)

    def load(*args, **kwargs):
        raise AssertionError("weights are loaded")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", load)


@pytest.fixture
def nothing_written(tmp_path):
    def files():
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if "__pycache__" not in path.parts}

    before = files()
    yield
    assert files() == before


@pytest.mark.usefixtures("nothing_written")
def test_the_tables_of_a_run(capsys):
    run(dataset_name="train.jsonl", dry_run="true", beta=0.1)
    out = capsys.readouterr().out
    assert out.startswith("BAPO on train.jsonl: a dry run. No weights are loaded, nothing is written.")
    assert "\n                        1 process *  8 processes  32 processes\n" in out
    assert "\n  prompts a generation            4           32           128\n" in out
    assert "\n  samples a generation           12           96           384\n" in out
    assert "\n  updates an epoch                8            0             0\n" in out
    assert "\n  Refused on 8: a generation takes 32 prompts, there are 16.\n" in out
    assert "\n  oldest sample, policy versions  1\n" in out
    assert "\n  mean age of a sample            0.5\n" in out
    assert "\nPrompts: 16 prompts\n  tokens: 4 (5%), 4 (median), 6 (95%), 6 (longest)\n" in out
    assert "\n  | 0+1=\n" in out
    assert '\nRewards of a made completion, "The answer is 1."\n  has_digit: 1\n' in out
    assert "\nGB on a GPU: 1 process, no sharding; 10.6k parameters\n" in out


@pytest.mark.usefixtures("nothing_written")
def test_the_function_of_notebooks_says_the_same(capsys):
    run(dataset_name="train.jsonl", dry_run="true")
    out = capsys.readouterr().out
    from my_rewards import has_digit

    args = BAPOConfig(
        "out", use_cpu=True, bf16=False, per_device_train_batch_size=6, gradient_accumulation_steps=1,
        steps_per_generation=2, num_generations=3, max_completion_length=6, learning_rate=2e-2, max_steps=2,
    )  # fmt: skip
    dataset = Dataset.from_json("train.jsonl")
    found = dry_run(args, "model", has_digit, dataset)
    assert out.rstrip() == f"BAPO on train.jsonl: a dry run. No weights are loaded, nothing is written.\n\n{found}"
    with pytest.raises(ValueError, match="`train_dataset` is None"):
        dry_run(args, "model", has_digit)
    with pytest.raises(ValueError, match="`model` is 'nowhere', and no model can be built"):
        dry_run(args, "nowhere", has_digit, dataset, character_tokenizer())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward_funcs": "my_rewards.nothing"}, "my_rewards"),
        ({"dataset_name": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"prompt_column": "problem"}, "problem"),
        ({"steps_per_generation": "64"}, "num_generations|prompts"),
        ({"ratio_lower_start": "2.0"}, "ratio_lower_start"),
    ],
)
def test_what_the_run_would_refuse_is_refused(settings, message):
    with pytest.raises((ValueError, SystemExit), match=message) as dry:
        run(**{"dataset_name": "train.jsonl", "dry_run": "true", **settings})
    with pytest.raises((ValueError, SystemExit), match=message) as real:
        run(**{"dataset_name": "train.jsonl", **settings})
    assert str(dry.value) == str(real.value)


def test_the_folder_of_an_earlier_run_is_refused_as_well():
    Path("out/checkpoint-2").mkdir(parents=True)
    Path("out/checkpoint-2/trainer_state.json").write_text("{}")
    with pytest.raises(ValueError, match="overwrite_output_dir"):
        run(dataset_name="train.jsonl", dry_run="true")
    run(dataset_name="train.jsonl", dry_run="true", overwrite_output_dir="true")
    assert Path("out/checkpoint-2").exists()


STAND_INS = {  # of the data sets of the Hub
    "aime24": {"eval_dataset": "aime.jsonl"},
    "aime25": {"eval_dataset": "aime.jsonl"},
    "gsm8k": {"dataset_name": "gsm8k"},
    "lora_small": {"dataset_name": "train.jsonl"},
    "math_7b": {"dataset_name": "skywork"},
    "released_recipe": {"dataset_name": "train.jsonl"},
    "stale_samples": {},
    "paper": {},
    "quickstart": {},
    "smollm2_sums": {"model_name_or_path": "model"},
}
SHAPE_7B = {
    "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "architectures": ["Qwen2ForCausalLM"],
    "max_position_embeddings": 131072,
}  # fmt: skip


def fill_stand_ins():
    rows = [*AIME24, *AIME24]
    Dataset.from_list(rows).to_json("aime.jsonl")
    DatasetDict(train=Dataset.from_list(GSM8K * 100), test=Dataset.from_list(GSM8K)).save_to_disk("gsm8k")
    DatasetDict(math=Dataset.from_list(SKYWORK * 100)).save_to_disk("skywork")
    sums = [{"prompt": f"{a}+{b}=", "solution": str(a + b)} for a in range(30) for b in range(30)]
    Dataset.from_list(sums).to_json("train.jsonl")
    Qwen2Config(**SHAPE_7B).save_pretrained("model")


@pytest.mark.parametrize("recipe", sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml")))
def test_every_recipe(recipe, capsys):
    fill_stand_ins()
    settings = dict(STAND_INS[recipe])
    if "7b" in recipe or "aime" in recipe or settings.get("dataset_name"):
        settings["model_name_or_path"] = "model"
    flags = [part for name, value in settings.items() for part in (f"--{name}", value)]
    cli.main(["launch", "--accelerate", "zero3", "--num_processes", "6", "train", "--config", recipe, *flags,
              "--dry_run", "true"])  # fmt: skip
    out = capsys.readouterr().out
    assert "Evaluation alone" in out if recipe.startswith("aime") else "\n  updates a generation" in out
    assert "\nGB on a GPU: 6 processes, ZeRO-3; " in out
    assert "raised" not in out
    if recipe == "math_7b":
        assert "; 7.62B parameters\n" in out
        assert re.search(r"\n  together +20\.3\n", out)  # 16 P / N
    assert not Path("outputs").exists()


def test_launchers_say_where(monkeypatch, capsys):
    args = BAPOConfig("out", use_cpu=True, bf16=False)
    environment = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2", "WORLD_SIZE": "4"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = dry_run(args, "model", train_dataset=Dataset.from_dict({"prompt": ["1"]}))
    assert found.layout == Layout(4, "zero2")
    assert "4 processes, ZeRO-2" in str(found)
