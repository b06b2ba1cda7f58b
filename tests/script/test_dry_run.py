"""`--dry_run true` through the front door: recipes, launchers, bad input; no weight is loaded, nothing is written."""

import json
import re
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from datasets import Dataset, DatasetDict
from datasets import config as datasets_config
from transformers import PreTrainedModel, Qwen2Config

from bapo_trl import BAPOConfig, cli, dry_run
from bapo_trl.tasks import character_tokenizer
from tests.helpers.commands import ROOT
from tests.helpers.script_runs import CHAT_TEMPLATE, SHORT, chat_tokenizer, fill_folder, flags, run
from tests.helpers.toy import ON_GPU, opt_model, toy_model
from tests.script.test_recipes import AIME24, GSM8K, SKYWORK


FROM_PRETRAINED = vars(PreTrainedModel)["from_pretrained"]
A_DRY_RUN = "dry run, no weights are loaded, nothing is written."


@pytest.fixture(autouse=True)
def _folder(tmp_path, tmp_path_factory, monkeypatch):
    fill_folder(tmp_path, monkeypatch, CHAT_TEMPLATE)
    monkeypatch.setattr(datasets_config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))

    def load(*args, **kwargs):
        raise AssertionError("weights are loaded")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", load)


@contextmanager
def nothing_written(folder):
    def files():
        return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if "__pycache__" not in path.parts}

    before = files()
    yield
    assert files() == before


def test_the_tables_of_a_run(capsys, tmp_path):
    with nothing_written(tmp_path):
        run(dataset_name="train.jsonl", dry_run="true", beta=0.1)
    out = capsys.readouterr().out
    assert out.startswith(f"BAPO on train.jsonl: {A_DRY_RUN}\n\n")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert {
        "samples per generation 12 (3 per prompt)", "samples per update 6 (1 process x 6 x 1 micro-batches)",
        "updates per generation 2", "max staleness 1 policy versions", "mean staleness 0.5 policy versions",
        "Prompts: 16, at most 6 tokens", "| 0+1=", "Rewards of an example completion, \"The answer is 1.\"",
        "has_digit: 1",
    } <= {*lines}  # fmt: skip
    assert "\n  plain text, though the model has a chat template: `--prompt_column prompt` makes" in out


def test_a_recipe_can_ask_for_it(capsys, tmp_path):
    launch = ["train", "--num_processes", "2"]
    for command, answer in ((["train"], True), (["evaluate"], "yes"), (launch, True)):
        recipe = {**SHORT, "dataset_name": "train.jsonl", "dry_run": answer}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        with nothing_written(tmp_path):
            cli.main([*command, "--config", "recipe.yaml"])
        assert A_DRY_RUN in capsys.readouterr().out
    with pytest.raises(SystemExit):  # flags come before a recipe
        cli.main(["train", "--config=recipe.yaml", "--dry_run", "false"])
    assert "weights are loaded" in capsys.readouterr().err


def test_the_function_of_notebooks_says_the_same(capsys, tmp_path):
    with nothing_written(tmp_path):
        run(dataset_name="train.jsonl", dry_run="true")
    out = capsys.readouterr().out
    from my_rewards import has_digit

    args = BAPOConfig(
        "out", use_cpu=True, bf16=False, per_device_train_batch_size=6, gradient_accumulation_steps=1,
        steps_per_generation=2, num_generations=3, max_completion_length=6, learning_rate=2e-2, max_steps=2,
        gradient_checkpointing=False,
    )  # fmt: skip
    found = dry_run(args, "model", has_digit, Dataset.from_json("train.jsonl"))
    assert out.rstrip() == f"BAPO on train.jsonl: {A_DRY_RUN}\n\n{found}"


def memory(out):
    """Return the rows of the table of memory, GiB by column."""
    table = out.partition("\nMemory per process in GiB, estimated; micro-batches of 6 samples\n")[2].partition("\n\n")[
        0
    ]
    rows = [re.split(r"  +", line.strip()) for line in table.splitlines()]
    return {
        name: [float(cell) for cell in cells] for name, *cells in rows if re.fullmatch(r"[\d.]+", "".join(cells[:1]))
    }


def test_the_memory_of_a_run(capsys, tmp_path):
    config = Qwen2Config(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    config.save_pretrained("large")
    chat_tokenizer().save_pretrained("large")
    large = {"dataset_name": "train.jsonl", "model_name_or_path": "large", "max_completion_length": "2000"}
    tuned = {"use_peft": "true", "lora_target_modules": "all-linear"}

    def table(command="train", launch=(), **settings):
        with nothing_written(tmp_path):
            cli.main([command, *launch, *flags(**large, dry_run="true", **settings)])
        return memory(capsys.readouterr().out)

    full, with_mean = table(), table(dry_run_mean_length="100")
    assert full["weights"] == full["gradients"] == [2.35]  # 630 million in float32
    assert full["optimizer states"] == [4.70]
    assert full["sum with gradient checkpointing"] < full["sum"]
    assert full["while samples are sampled"] > full["weights"]
    assert "reference model" not in full
    assert [with_mean["weights"], with_mean["sum"][:1]] == [full["weights"] * 2, full["sum"]]
    assert with_mean["sum"][1] < with_mean["sum"][0]
    checkpointed = table(gradient_checkpointing="true")
    assert checkpointed["sum"] == full["sum with gradient checkpointing"]
    assert checkpointed["sum without gradient checkpointing"] == full["sum"]
    assert table(dtype="bfloat16")["weights"] == [1.17]
    assert table(**tuned)["optimizer states"] < [0.1]
    assert table(beta="0.1")["reference model"] == full["weights"]
    sharded = table(launch=["--accelerate_config", "cpu_zero3", "--num_processes", "4"])
    assert sharded["weights"] == sharded["gradients"] == [0.59]  # a quarter, computed in float32
    assert table(command="evaluate") == {}


BROKEN_REWARDS = """
def raises(completions, **kwargs):
    return [kwargs["missing_column"] for _ in completions]
def gives_text(completions, **kwargs):
    return ["good" for _ in completions]
def is_infinite(completions, **kwargs):
    return [float("inf") for _ in completions]
def gives_one(completions, **kwargs):
    return [1.0]
async def raises_later(completions, **kwargs):
    raise RuntimeError("no judge answers")
"""
NO_GPU = {"use_cpu": None, "bf16": None}
without_gpu = pytest.mark.skipif(ON_GPU, reason="there is a GPU")
LEARNED = {"model_name_or_path": "learned"}  # positions up to 64
LONG = {"model_name_or_path": "long"}  # with a smallest length
PARTIAL = {"partial_rollout_oversampling": "1.5", "partial_rollout_chunk_length": "3"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param(NO_GPU, "`use_cpu` is false, but no GPU was found", marks=without_gpu),
        pytest.param({**NO_GPU, "do_train": "false"}, "`use_cpu` is false, but no GPU was found", marks=without_gpu),
        ({"reward_funcs": "my_rewards.nothing"}, "`reward_funcs` has 'my_rewards.nothing', which cannot be imported"),
        ({"reward_funcs": "broken_rewards.raises"}, "missing_column"),
        ({"reward_funcs": "broken_rewards.raises_later"}, "no judge answers"),
        ({"reward_funcs": "my_rewards.has_digit|broken_rewards.gives_text"}, "`gives_text` returned .*'good'"),
        ({"reward_funcs": "broken_rewards.is_infinite"}, "`is_infinite` returned inf"),
        ({"reward_funcs": "broken_rewards.gives_one"}, r"`gives_one` returned 1 rewards for \d+ samples"),
        ({"steps_per_generation": "10"}, "prompts, (but one generation takes|there are)"),
        ({"dataset_name": "none.jsonl"}, "`dataset_name` is 'none.jsonl', which is no file or folder here"),
        ({"model_name_or_path": "none"}, "is 'none', but the tokenizer of 'none' cannot be loaded"),
        ({"model_name_or_path": "small"}, r"The tokenizer has token ids up to \d+, but the model's `vocab_size` is 9"),
        ({"model_name_or_path": None}, "`model_name_or_path` is not set"),
        ({"use_liger_kernel": "true"}, "`use_liger_kernel` needs the package liger_kernel"),
        ({"optim": "lomo"}, "lomo"),
        ({"push_to_hub": "true"}, "push_to_hub|offline"),
        ({"use_peft": "true", "lora_target_modules": "nothing"}, "Target modules .*nothing.* not found"),
        ({"reward_weights": "1.0|2.0"}, "(?i)reward.weights"),
        ({"report_to": "wandbb"}, "wandbb is not supported"),
        ({"attn_implementation": "flash_attention_2"}, "(?i)flash.?attention"),
        ({"model_name_or_path": "greedy"}, "`generation_config` cannot be saved .*`temperature`.*do_sample"),
        ({**LONG, **PARTIAL}, "`min_new_tokens` .*`generation_config`.*partial rollouts"),
        ({**LEARNED, "eval_dataset": "long.jsonl"}, "A prompt of the eval dataset is too long"),
        ({"use_vllm": "true"}, r"`use_vllm` needs the package vllm.*pip install 'bapo-trl\[vllm\]'"),
        ({"output_dir": "small/config.json"}, "small/config.json"),
        ({"resume_from_checkpoint": "true"}, "(?i)no (complete|valid) checkpoint"),
        ({"resume_from_checkpoint": "elsewhere/checkpoint-2"}, "elsewhere/checkpoint-2.*there is no such folder"),
        ({**LEARNED, "dataset_name": "long.jsonl"}, "A prompt of the train dataset is too long"),
        ({**LEARNED, "max_completion_length": "64"}, "`max_completion_length` 64"),
    ],
)
def test_what_the_run_stops_at_ends_the_dry_run(settings, message, monkeypatch, tmp_path, capsys):
    Path("broken_rewards.py").write_text(BROKEN_REWARDS)
    toy_model(vocab_size=9).save_pretrained("small")
    opt_model().save_pretrained("learned")
    for name, of_file in (("greedy", {"do_sample": False, "temperature": 0.7}), ("long", {"min_new_tokens": 5})):
        toy_model().save_pretrained(name)
        leave(f"{name}/generation_config.json", json.dumps(of_file))
    for folder in ("small", "learned", "greedy", "long"):
        character_tokenizer().save_pretrained(folder)
    Dataset.from_dict({"prompt": ["1", "2", "3", "1" * 62]}).to_json("long.jsonl")
    arguments = flags(**{"dataset_name": "train.jsonl", **settings})
    with nothing_written(tmp_path), pytest.raises(SystemExit) as ended:
        cli.main(["train", *arguments, "--dry_run"])
    out, err = capsys.readouterr()
    assert ended.value.code == 1
    if "use_cpu" in settings:  # only the machine lacks something
        assert "Evaluation only" in out if "do_train" in settings else "samples per generation" in out
    last = err.splitlines()[-1]
    assert last.startswith("bapo-trl train: error: ") or "broken_rewards.raises" in str(settings)
    assert re.search(message, last)
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", FROM_PRETRAINED)
    with pytest.raises(Exception, match=message):  # whatever a library or a user's reward raises
        run(**{"dataset_name": "train.jsonl", **settings})


def leave(file: str, text: str = "{}") -> None:
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text(text)


STAND_INS = {  # of the data sets and models of the Hub
    "aime24": ["--eval_dataset=aime.jsonl", "--model_name_or_path=model"],
    "aime25": ["--eval_dataset=aime.jsonl", "--model_name_or_path=model"],
    "gsm8k": ["--dataset_name=gsm8k", "--model_name_or_path=model"],
    "lora_small": ["--dataset_name=train.jsonl", "--model_name_or_path=model"],
    "qlora_small": ["--dataset_name=train.jsonl", "--model_name_or_path=model"],
    "math_7b": ["--dataset_name=skywork", "--model_name_or_path=model"],
    "released_recipe": ["--dataset_name=train.jsonl", "--model_name_or_path=model"],
    "smollm2_sums": ["--model_name_or_path=model"],
}


@pytest.mark.parametrize("recipe", sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml")))
def test_every_recipe(recipe, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    monkeypatch.setattr("bapo_trl.script.preparation.check_packages", lambda *args: None)
    Dataset.from_list([*AIME24, *AIME24]).to_json("aime.jsonl")
    DatasetDict(train=Dataset.from_list(GSM8K * 100), test=Dataset.from_list(GSM8K)).save_to_disk("gsm8k")
    DatasetDict(math=Dataset.from_list(SKYWORK * 100)).save_to_disk("skywork")
    sums = [{"prompt": f"{a}+{b}=", "solution": str(a + b)} for a in range(30) for b in range(30)]
    Dataset.from_list(sums).to_json("train.jsonl")
    command = ["--config", recipe, *STAND_INS.get(recipe, ()), "--dry_run", "true"]
    capsys.readouterr()
    with nothing_written(tmp_path):
        cli.main(["train", "--accelerate_config", "zero3", "--num_processes", "6", *command])
    out = capsys.readouterr().out
    assert ("\nEvaluation only" if "aime" in recipe else " (6 processes x ") in out
    assert "\nRewards of an example completion" in out


def test_a_prompt_beyond_a_rotary_window_gives_one_warning():
    folder = Path("short_window")
    toy_model(max_position_embeddings=8).save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    with pytest.warns(UserWarning, match=(message := "A prompt of the train dataset is too long")) as warned:
        run(dataset_name="train.jsonl", model_name_or_path=str(folder), dry_run="true", do_eval="false")
    assert sum(message in str(each.message) for each in warned) == 1
