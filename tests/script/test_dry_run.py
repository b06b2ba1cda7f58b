"""`--dry_run true` through the front door: recipes, launchers, bad input; no weight is loaded, nothing is written."""

import json
import re
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from datasets import Dataset, DatasetDict, is_caching_enabled
from datasets import config as datasets_config
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel, Qwen2Config

from bapo_trl import BAPOConfig, cli, dry_run
from bapo_trl.errors import InputError
from bapo_trl.script import planning
from bapo_trl.tasks import character_tokenizer, smollm2
from tests.helpers.commands import ROOT
from tests.helpers.script_runs import CHAT_TEMPLATE, SHORT, fill_folder, flags, run, train_bapo
from tests.helpers.toy import opt_model, toy_model
from tests.script.test_recipes import AIME24, GSM8K, SKYWORK


FROM_PRETRAINED = vars(PreTrainedModel)["from_pretrained"]


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    fill_folder(tmp_path, monkeypatch, CHAT_TEMPLATE)

    def load(*args, **kwargs):
        raise AssertionError("weights are loaded")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", load)


@pytest.fixture(autouse=True)
def _caches(tmp_path, monkeypatch):
    monkeypatch.setenv("BAPO_TRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets_config, "HF_DATASETS_CACHE", tmp_path / "hf")
    assert is_caching_enabled()


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
    assert out.startswith("BAPO on train.jsonl: a dry run. No weights are loaded, nothing is written.")
    assert "\n                        1 process *  8 processes  32 processes\n" in out
    assert "\n  prompts a generation            4           32           128\n" in out
    assert "\n  samples a generation           12           96           384\n" in out
    assert "\n  updates an epoch                8            0             0\n" in out
    assert "\n  Refused on 8: a generation takes 32 prompts, there are 16.\n" in out
    assert "\n  oldest age of a sample   1 policy versions\n" in out
    assert "\n  mean age of a sample     0.5 policy versions\n" in out
    assert "\nPrompts: 16 prompts\n  tokens: 4 (5%), 4 (median), 6 (95%), 6 (longest)\n" in out
    assert "\n  | 0+1=\n" in out
    assert "\n  plain text, though the model has a chat template: `--prompt_column prompt` makes" in out
    assert '\nRewards of a made completion, "The answer is 1."\n  has_digit: 1\n' in out
    assert "Advice" not in out  # of 2 updates per generation


def test_a_run_on_held_out_prompts_counts_those_and_a_punishment_goes_by_the_length_of_a_completion(capsys):
    held_out = {"dataset_name": "train.jsonl", "eval_fraction": 0.25, "do_train": "false", "dry_run": "true"}
    run(**held_out, reward_funcs="get_soft_overlong_punishment", max_completion_length=18)
    out = capsys.readouterr().out
    assert "\nPrompts: 4 prompts\n" in out
    assert "soft_overlong_punishment_reward: -0.333333\n" in out  # of 16 tokens, one is in the last 3


def test_a_completion_beyond_the_window_is_said_to_be_so(capsys):
    run(dataset_name="train.jsonl", dry_run="true", max_completion_length=200000)
    out = capsys.readouterr().out
    assert "completion of 200000: none, it does not fit into the window of 32768; too long: 16\n" in out
    assert "fits" not in out


def test_a_recipe_can_ask_for_it(capsys, tmp_path):
    launch = ["launch", "--num_processes", "2", "train"]
    for command, answer in ((["train"], True), (["evaluate"], "yes"), (launch, True)):
        recipe = {**SHORT, "dataset_name": "train.jsonl", "dry_run": answer}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        with nothing_written(tmp_path):
            cli.main([*command, "--config", "recipe.yaml"])
        assert "a dry run. No weights are loaded, nothing is written." in capsys.readouterr().out
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
        ({"steps_per_generation": "64"}, "num_generations|prompts"),
        ({"ratio_lower_start": "2.0"}, "ratio_lower_start"),
        # By TRL or the model
        ({"reward_weights": "1.0|2.0"}, "(?i)reward.weights"),
        ({"model_name_or_path": "adapter", "use_peft": "true"}, "`use_peft` asks for a new adapter"),
        ({"model_name_or_path": "learned", "max_completion_length": "62"}, "window"),
        ({"model_name_or_path": "learned", "max_completion_length": "64"}, "`max_completion_length` is 64"),
    ],
)
def test_what_the_run_would_refuse_or_fail_at_is_refused(settings, message, monkeypatch, tmp_path):
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", FROM_PRETRAINED)
    opt_model().save_pretrained(tmp_path / "learned")
    character_tokenizer().save_pretrained(tmp_path / "learned")
    get_peft_model(toy_model(), LoraConfig(r=2)).save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": "model"}))
    for dry_run_too in ("true", "false"):
        with pytest.raises((ValueError, RuntimeError, SystemExit)) as refusal:
            run(**{"dataset_name": "train.jsonl", "dry_run": dry_run_too, **settings})
        said = [str(refusal.value), *getattr(refusal.value, "__notes__", ())]
        assert re.search(message, " ".join(said)), said


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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (NO_GPU, "`use_cpu` is false, but no GPU was found"),
        ({**NO_GPU, "do_train": "false"}, "`use_cpu` is false, but no GPU was found"),
        ({"reward_funcs": "broken_rewards.raises"}, "missing_column"),
        ({"reward_funcs": "broken_rewards.raises_later"}, "no judge answers"),
        ({"reward_funcs": "my_rewards.has_digit|broken_rewards.gives_text"}, "`gives_text` returned 'good'"),
        ({"reward_funcs": "broken_rewards.is_infinite"}, "`is_infinite` returned inf"),
        ({"dataset_name": "none.jsonl"}, "`dataset_name` is 'none.jsonl', but there is no such file"),
        ({"dataset_name": "org/none"}, "`dataset_name` is 'org/none', which is neither a file nor"),
        ({"dataset_name": None, "eval_dataset": "test.jsonl"}, "`dataset_name` is not set"),
        (
            {"model_name_or_path": "none"},
            "`model_name_or_path` is 'none', and the tokenizer of 'none' cannot be loaded",
        ),
        ({"model_name_or_path": "small"}, r"The tokenizer has tokens up to \d+, but the model has 9"),
        ({"model_name_or_path": None}, "`model_name_or_path` is not set"),
        ({"sync_ref_model": "true"}, "(?s)`?sync_ref_model.*beta"),
        ({"sync_ref_model": "true", "beta": "0.1", "use_peft": "true"}, "(?i)sync_ref_model.*(adapter|peft)"),
        ({"save_strategy": "best"}, "metric_for_best_model` (is not set|must be provided)"),
        ({"use_liger_kernel": "true"}, "`use_liger_kernel` needs the package liger_kernel"),
        ({"optim": "adamw_8bit"}, "`optim` is 'adamw_8bit': You need to install `bitsandbytes`"),
        ({"push_to_hub": "true"}, "`push_to_hub` is set, but the Hub cannot be pushed to"),
        ({"reward_funcs": "broken_rewards.gives_one"}, r"`gives_one` returned 1 rewards for \d+ samples"),
        ({"resume_from_checkpoint": "true"}, "(?i)no (complete|valid) checkpoint"),
        ({"resume_from_checkpoint": "elsewhere/checkpoint-2"}, "elsewhere/checkpoint-2.*there is no such folder"),
        ({"use_vllm": "true"}, r"`use_vllm` needs the package vllm.*pip install 'bapo-trl\[vllm\]'"),
        ({"attn_implementation": "flash_attention_2"}, "(?i)flash.?attention"),
        ({"model_name_or_path": "learned", "eval_dataset": "long.jsonl"}, "1 of the 1 prompts of the eval dataset"),
    ],
)
def test_what_the_run_stops_at_ends_the_dry_run_after_its_tables(settings, message, monkeypatch, tmp_path, capsys):
    Path("broken_rewards.py").write_text(BROKEN_REWARDS)
    toy_model(vocab_size=9).save_pretrained("small")
    opt_model().save_pretrained("learned")
    for folder in ("small", "learned"):
        character_tokenizer().save_pretrained(folder)
    Dataset.from_dict({"prompt": ["1" * 70]}).to_json("long.jsonl")
    arguments = flags(**{"dataset_name": "train.jsonl", **settings})
    with nothing_written(tmp_path), pytest.raises(SystemExit) as ended:
        cli.main(["train", *arguments, "--dry_run"])
    out, err = capsys.readouterr()
    assert ended.value.code == 1
    expected = "Evaluation alone" if settings.get("do_train") == "false" else "\n  samples a generation           12 "
    assert expected in out
    last = err.splitlines()[-1]
    assert last.startswith("bapo-trl train: error: ")
    assert re.search(message, last)
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", FROM_PRETRAINED)
    with pytest.raises(Exception, match=message):  # whatever a library or a user's reward raises
        run(**{"dataset_name": "train.jsonl", **settings})


def test_several_problems_are_all_named(capsys):
    arguments = flags(**NO_GPU, dataset_name="none.jsonl", resume_from_checkpoint="true")
    with pytest.raises(SystemExit):
        cli.main(["launch", "--num_processes", "2", "train", *arguments, "--dry_run"])
    out, err = capsys.readouterr()
    assert "\n                        2 processes *  1 process  8 processes  32 processes\n" in out
    assert re.search(
        r"3 problems\. \(1\) `use_cpu` .* \(2\) `resume_from_checkpoint` .* \(3\) `dataset_name` is ", err
    )


def test_a_reward_that_fails_ends_what_python_prints():
    def raises(completions, **kwargs):
        raise KeyError("missing_column")

    args = BAPOConfig("out", use_cpu=True, bf16=False, per_device_train_batch_size=8)
    dataset = Dataset.from_dict({"prompt": ["1+1=", "2+2="]})
    found = dry_run(args, "model", raises, dataset)
    given = 'given the first prompt and "The answer is 1."'
    sentence = f"The reward function `raises` raised KeyError: 'missing_column' ({given})."
    assert found.problems == [sentence]
    assert str(found).endswith(f"\n\nThe run would stop: {sentence}")
    # 8 samples are one prompt with 8 completions; on 8 processes, 8 prompts
    on_eight = dry_run(args, "model", None, dataset, processes=8)
    assert on_eight.problems == ["On 8 processes, a generation takes 8 prompts, there are 2."]


def test_a_dry_run_of_a_merge_needs_its_base_and_says_the_type(capsys, monkeypatch):
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: False)
    merge = ["train", *flags(**{**MERGES, **NO_GPU}), "--dry_run"]
    leave("adapter/adapter_config.json", json.dumps({"base_model_name_or_path": "model"}))
    cli.main(merge)
    assert capsys.readouterr().out.endswith("\nWeights are saved in float32, as its base.\n")
    leave("adapter/run_settings.json", json.dumps({"dtype": "bfloat16"}))
    cli.main(merge)
    assert capsys.readouterr().out.endswith("\nWeights are saved in bfloat16, as it was trained.\n")
    leave("adapter/adapter_config.json", json.dumps({"base_model_name_or_path": "gone"}))
    with pytest.raises(SystemExit):
        cli.main(merge)
    assert "an adapter of 'gone', and that base cannot be loaded" in capsys.readouterr().err


def test_samples_of_a_generation_may_be_given_for_all_processes(capsys):
    settings = {"steps_per_generation": None, "generation_batch_size": 48, "num_generations": 4}
    arguments = flags(dataset_name="train.jsonl", **settings)
    cli.main(["launch", "--num_processes", "2", "train", *arguments, "--dry_run"])
    out = capsys.readouterr().out
    assert re.search(r"\n +2 processes \*  1 process  8 processes  32 processes\n", out)
    assert re.search(r"\n  samples a generation +48 +48 +48 +48\n", out)
    assert re.search(r"\n  samples an update +12 +6 +48 +192\n", out)
    assert re.search(r"\n  updates a generation +4 +8 +1 +0.25\n", out)
    assert "Refused on 32: generation_batch_size 48 is no multiple of 192, a micro-batch on each process." in out
    assert "\nStaleness, on 2 processes\n" in out


@pytest.mark.parametrize(
    ("settings", "oldest"),
    [
        ({"replay_fraction": 0.25, "replay_max_staleness": 5}, "5 policy versions (replay queue)"),
        ({"replay_fraction": 0.25, "replay_max_staleness": 5, "partial_rollout_oversampling": 1.5,
          "partial_rollout_chunk_length": 3, "partial_rollout_max_staleness": 7},
         "7 policy versions (replay queue and partial rollouts)"),
    ],
)  # fmt: skip
def test_ages_of_samples_that_are_kept(settings, oldest, capsys):
    run(dataset_name="train.jsonl", dry_run="true", **settings)
    out = capsys.readouterr().out
    assert f"\n  oldest age of a sample   {oldest}\n" in out
    assert "\n  mean age of a sample     0.5 policy versions of fresh ones; of all not known before the run\n" in out


def test_the_folder_of_an_earlier_run_is_refused_as_well(tmp_path):
    checkpoint = tmp_path / "out" / "checkpoint-2"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text("{}")
    with pytest.raises(ValueError, match="overwrite_output_dir"):
        run(dataset_name="train.jsonl", dry_run="true")
    run(dataset_name="train.jsonl", dry_run="true", overwrite_output_dir="true")
    assert checkpoint.exists()


def leave(file: str, text: str = "{}") -> None:
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text(text)


MERGES = {"do_train": "false", "model_name_or_path": "adapter", "merge_adapter": "true"}


@pytest.mark.parametrize(
    ("left", "settings", "message"),
    [
        ("out/merged/config.json", {"use_peft": "true", "merge_adapter": "true"}, "which holds merged of an"),
        ("out/merged/config.json", {"dataset_name": None, **MERGES}, "which holds merged of an"),
        ("out/checkpoint-2/trainer_state.json", {"do_train": "false", "resume_from_checkpoint": "out/checkpoint-2"},
         "`do_train` is false and evaluation is of `model_name_or_path`"),
        ("out/checkpoint-2/trainer_state.json", {"resume_from_checkpoint": "other/checkpoint-2"},
         "which holds checkpoint-2 of an earlier run"),
        ("out/notes.txt", {"dataset_name": None, **MERGES, "model_name_or_path": "model"}, "there is no adapter"),
    ],
)  # fmt: skip
def test_what_the_run_would_not_begin_with_is_refused_as_well(left, settings, message):
    leave("adapter/adapter_config.json", json.dumps({"base_model_name_or_path": "model"}))
    leave(left)
    refusals = []
    for dry_run_too in ("true", "false"):
        with pytest.raises(InputError, match=message) as refusal:
            run(**{"dataset_name": "train.jsonl", "dry_run": dry_run_too, **settings})
        refusals.append(str(refusal.value))
    assert refusals[1] in refusals[0]  # which has all of them


@pytest.mark.parametrize(
    ("left", "arguments", "said"),
    [
        ("outputs/quickstart/model.safetensors", ["--config", "quickstart"],
         "BAPO on the embedded task (sums of two numbers): a dry run."),
        ("out/checkpoint-2/trainer_state.json", flags(**MERGES),
         "Merges the adapter adapter into its base model, in out/merged: a dry run."),
        ("out/checkpoint-2/trainer_state.json", flags(dataset_name="train.jsonl", resume_from_checkpoint="true"),
         "BAPO on train.jsonl: a dry run."),
    ],
)  # fmt: skip
def test_what_the_run_would_begin_with_is_not_refused(left, arguments, said, capsys, tmp_path):
    leave("adapter/adapter_config.json", json.dumps({"base_model_name_or_path": "model"}))
    leave(left, json.dumps({"global_step": 2, "epoch": 1.0}))
    with nothing_written(tmp_path):
        train_bapo.main([*arguments, "--dry_run", "true"])
    assert capsys.readouterr().out.startswith(f"{said} No weights are loaded, nothing is written.\n")


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
SHAPE_05B = {
    "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip


def fill_stand_ins(folder, shape):
    rows = [*AIME24, *AIME24]
    Dataset.from_list(rows).to_json(folder / "aime.jsonl")
    DatasetDict(train=Dataset.from_list(GSM8K * 100), test=Dataset.from_list(GSM8K)).save_to_disk(folder / "gsm8k")
    DatasetDict(math=Dataset.from_list(SKYWORK * 100)).save_to_disk(folder / "skywork")
    sums = [{"prompt": f"{a}+{b}=", "solution": str(a + b)} for a in range(30) for b in range(30)]
    Dataset.from_list(sums).to_json(folder / "train.jsonl")
    Qwen2Config(**shape).save_pretrained(folder / "model")


@pytest.mark.parametrize("recipe", sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml")))
def test_every_recipe(recipe, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    monkeypatch.setattr("bapo_trl.script.preparation.check_packages", lambda *args: None)
    fill_stand_ins(tmp_path, SHAPE_05B if recipe in ("gsm8k", "lora_small") else SHAPE_7B)
    settings = dict(STAND_INS[recipe])
    if "7b" in recipe or "aime" in recipe or settings.get("dataset_name"):
        settings["model_name_or_path"] = "model"
    given = [f"--{name}={value}" for name, value in settings.items()]
    capsys.readouterr()
    with nothing_written(tmp_path):
        cli.main(["launch", "--accelerate", "zero3", "--num_processes", "6", "train", "--config", recipe, *given,
                  "--dry_run", "true"])  # fmt: skip
    out, err = capsys.readouterr()
    assert "Evaluation alone" in out if recipe.startswith("aime") else "\n  updates a generation" in out
    assert "  6 processes *  1 process  8 processes" in out or "Evaluation alone" in out
    assert "raised" not in out
    assert "Map" not in err
    assert "Generating" not in err


def test_a_model_that_is_not_fetched_yet_stays_so(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: object())
    with nothing_written(tmp_path):
        cli.main(["train", "--config", "smollm2_sums", "--dry_run", "true"])
    out = capsys.readouterr().out
    assert "\n  samples a generation" in out
    assert "\nStaleness" in out
    assert out.endswith("\nThe model is not built yet: its prompts and rewards are not known before it is.\n")


def test_a_model_that_could_not_be_read_is_refused(monkeypatch):
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None if name == "gguf" else name)
    with pytest.raises(ImportError, match=r"package `gguf`, and that is not installed: pip install 'bapo-trl\[llm\]'"):
        planning.print_plan(["--config", "smollm2_sums", "--dry_run", "true"])


def test_the_processes_of_a_launcher_are_counted(monkeypatch):
    args = BAPOConfig("out", use_cpu=True, bf16=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    found = dry_run(args, "model", train_dataset=Dataset.from_dict({"prompt": ["1"]}))
    assert found.processes == found.counts[0].processes == 4
    assert "4 processes *" in str(found)
