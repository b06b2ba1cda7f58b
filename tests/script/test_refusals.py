"""What `bapo-trl train` rejects: in one line that names the setting, its value and the fix, without a traceback."""

import re
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from bapo_trl import cli
from bapo_trl.script.command_line import parse_arguments
from tests.helpers.script_runs import fill_folder, flags


FILES = {
    "seed.yaml": "seed: one\n",
    "key.yaml": "learning_rat: 1.0e-6\n",
    "no_data.yaml": "max_steps: 1\n",
    "files/a.jsonl": '{"prompt": "1+1="}\n',
    "files/b.jsonl": '{"prompt": \n',
    "mixed/a.jsonl": '{"prompt": "1+1="}\n',
    "mixed/b.jsonl": '{"prompt": ["1"], "x": 1}\n',
    "lists.jsonl": '{"prompt": ["1+1=", "2"]}\n',
    "three.jsonl": '{"prompt": "1+1="}\n{"prompt": "1+2="}\n{"prompt": "1+3="}\n',
    "chats.jsonl": '{"prompt": [{"role": "user", "content": "1+1="}]}\n' * 4,
    "empty.yaml": "",
    "list.yaml": "- max_steps: 3\n- seed: 1\n",
    "env.yaml": "env: [A]\n",
    "broken.yaml": "max_steps: 3\nseed: [1\n",
    "twice.yaml": "max_steps: 3\nseed: 1\nmax_steps: 4\n",
    "methods.yaml": "method: [grpo, bapo]\n",
    "sapo.yaml": "method: vespo\nloss_type: sapo\n",
    "parts.yaml": "datasets: [{path: json, data_files: none.jsonl}]\n",
}
AT_ONCE = [
    # Flags: abbreviated; misspelt, beside a setting (bf16 on a CPU) that would be rejected too
    (
        {"positive_contribution": 1},
        r"unknown flag: --positive_contribution \(the nearest is --positive_contribution_",
    ),
    ({"max-stepz": 3, "bf16": "true"}, r"--max-stepz \(the nearest is --max_steps\)$"),
    ({"confg": "x", "sed": 1}, r"--confg \(the nearest is --config\), --sed \(the nearest is --seed\)$"),
    ({"lr": 3, "quiet": "true"}, r"--lr \(none is near\), --quiet \(none is near\)$"),
    ({"output_dir": "out|recipes/math_7b.yaml"}, "'recipes/math_7b.yaml' follows no flag"),
    # Methods
    ({"method": "dapo"}, "`method` is 'dapo': set it to one of trl, grpo"),
    ({"config": "methods.yaml"}, r"`method` is \['grpo', 'bapo'\]: set it to one of trl, grpo"),
    (
        {"method": "grpo", "ratio_upper_max": 1.3},
        "sets `ratio_upper_max` to 1.2, but `ratio_upper_max` is '1.3'",
    ),
    ({"method": "bapo", "loss_type": "vespo"}, "which sets `loss_type` to 'dapo', but `loss_type` is 'vespo'"),
    ({"config": "stale_samples", "method": "recommended", "loss_type": "dapo"}, "sets `loss_type` to 'vespo'"),
    ({"config": "sapo.yaml"}, "`method` is 'vespo', which sets `loss_type` to 'vespo', but `loss_type` is 'sapo'"),
    # Recipes
    *(
        ({"config": name}, f"`config` is '{name}', which does not exist: set a YAML file, or a recipe: aime24, ")
        for name in ("missing.yaml", "model", "elsewhere/math_7b.yaml", "")
    ),
    ({"config": "empty.yaml"}, "is not a mapping of names to values: write one setting per line, such as `learn"),
    ({"config": "list.yaml"}, "^bapo-trl train: error: list.yaml or its `env` is not a mapping"),
    ({"config": "env.yaml"}, "env.yaml or its `env` is not a mapping"),
    ({"config": "broken.yaml"}, "broken.yaml is not valid YAML .*line 2, column 7"),
    ({"config": "twice.yaml"}, "the key `max_steps` is set twice, again in line 3"),
]
REFUSED = [
    # Recipes
    ({"config": "seed.yaml"}, "argument --seed: invalid int value: 'one'"),
    ({"config": "parts.yaml", "dataset_name": None}, r"`datasets` \('json'\) could not be loaded: .*none\.jsonl"),
    ({"config": "key.yaml"}, r"unknown key in key.yaml: learning_rat \(the nearest is learning_rate\)$"),
    ({"config": "no_data.yaml", "dataset_name": None}, "`dataset_name` is not set.*embedded"),
    # Of TRL and transformers
    ({"logging_steps": 0}, "IntervalStrategy.STEPS requires non-zero --logging_steps"),
    ({"optim": "sgdd"}, r"argument --optim: invalid choice: 'sgdd' \(choose from "),
    (
        {"steps_per_generation": 1, "num_generations": 4},
        r"generation_batch_size \(6\) must be divisible by num_generations \(4\)",
    ),
    ({"reward_funcs": "accuracy"}, "`reward_funcs` has 'accuracy'.*accuracy_reward"),
    ({"reward_funcs": None}, "`reward_funcs` is not set"),
    # Nothing of the demo's stands in
    ({"dataset_name": None}, "`dataset_name` is not set: set it to a json, jsonl or parquet file"),
    ({"dataset_name": None, "eval_dataset": "test.jsonl"}, "`dataset_name` is not set"),
    ({"dataset_name": "embedded", "model_name_or_path": None}, "`model_name_or_path` is not set"),
    ({"bf16_full_eval": "true", "do_eval": "true"}, "`bf16_full_eval` or .* --do_train false"),
    # Data
    ({"dataset_name": "./missing.jsonl"}, "`dataset_name` is './missing.jsonl', which is no file or folder here"),
    (
        {"dataset_name": "files"},
        "which cannot be loaded: '.*files/b.jsonl' has a JSON parse error in line",
    ),
    (
        {"dataset_name": "seed.yaml"},
        r"`dataset_name` is 'seed.yaml', which cannot be loaded: its suffix is not one",
    ),
    ({"dataset_name": "mixed"}, r"the prompt of row 1 is \['1'\]"),
    ({"dataset_name": "lists.jsonl"}, r"the prompt of row 0 is \['1\+1=', '2'\]. Use text, or a list of messages"),
    (
        {"dataset_name": "three.jsonl"},
        "dataset has 3 prompts, but one generation takes 4 .*12 / `num_generations` 3.*`steps_per_generation` .2.",
    ),
    ({"dataset_name": "chats.jsonl"}, "prompts are chat messages, but the chat template .* does not accept them"),
    ({"dataset_train_split": "trein"}, "`dataset_train_split` is 'trein'.*'train'"),
    ({"do_eval": "true"}, "`dataset_test_split` is 'test'.*train"),
    ({"eval_dataset": "tset.jsonl"}, "`eval_dataset` is 'tset.jsonl', which is no file or folder here"),
    ({"eval_dataset": "two"}, "`dataset_test_split` is 'test', but the dataset has only the splits"),
    ({"eval_dataset": "two", "dataset_test_split": "b"}, r"eval dataset \(two\) has no `prompt` column"),
    ({"eval_dataset": "test.jsonl", "eval_fraction": 0.5}, "`eval_dataset` and `eval_fraction` are both set"),
    ({"eval_dataset": "test.jsonl", "max_eval_samples": 0}, "`max_eval_samples` is 0: set it to at least 1"),
    ({"eval_fraction": 1.5}, "`eval_fraction` is 1.5, but the data cannot be split: "),
    ({"eval_fraction": 0.5, "dataset_streaming": "true"}, "`eval_fraction` is 0.5, but the data cannot be split"),
    ({"extract_answer": "box"}, "`extract_answer` has 'box', which is not known: choose one of boxed, last_number"),
    ({"answer_column": "answer"}, r"train dataset \(train.jsonl\) has no `answer` column, only .*`--answer_column`"),
    ({"system_prompt": "Add."}, "`system_prompt` is set, but the tokenizer .* has no chat template"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = fill_folder(tmp_path_factory.mktemp("rejected"), patch)
        for name, text in FILES.items():
            Path(name).parent.mkdir(exist_ok=True)
            Path(name).write_text(text)
        part = Dataset.from_list([{"text": "1+1="}])
        DatasetDict(a=part, b=part).save_to_disk("two")
        yield folder


@pytest.mark.parametrize(
    ("settings", "message"), [*AT_ONCE, *(pytest.param(*case, marks=pytest.mark.fuzz) for case in REFUSED)]
)
def test_user_errors_end_the_command_with_one_line(folder, settings, message, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", *flags(**{"dataset_name": "train.jsonl", **settings})])
    assert ended.value.code in (1, 2)
    said = capsys.readouterr().err
    line = said.splitlines()[-1]
    assert line.startswith("bapo-trl train: error: ")
    assert re.search(message, line)
    assert "Traceback" not in said
    assert "usage: " not in said


def parse_recipe(folder, text, *flags):
    (folder / "own.yaml").write_text(f"use_cpu: true\nbf16: false\n{text}\n")
    return parse_arguments(["--config", str(folder / "own.yaml"), *flags])


@pytest.mark.parametrize(
    "line",
    [
        "learning_rate: [1.0e-6]", "learning_rate: true", "learning_rate: fast", "learning_rate:",
        "max_steps: 6.5", "max_steps: false", "max_steps: '6.5'", "save_steps: true", "seed: .inf",
        "num_generations: {a: 1}", "ratio_upper_max: [3.0]",
        "output_dir: 2024", "output_dir: 2024-01-31", "output_dir: [out]", "eval_strategy: no", "loss_type: 1",
        "model_name_or_path: 7", "optim: sgdd", "lr_scheduler_type: [linear]", "dtype: fp32",
        "use_peft: 2", "use_peft: maybe", "use_peft: [true]", "bf16_full_eval:",
        "reward_funcs: [my.reward, 2]", "reward_weights: [1.0, true]", "reward_weights: {a: 1}",
        "lora_target_modules: [[q_proj]]", "report_to: [wandb, 1]", "report_to: false",
        "lr_scheduler_kwargs: 5", "lr_scheduler_kwargs: '{\"min_lr\": '", "generation_kwargs: [top_k]",
        "generation_kwargs: top_k=3", "liger_kernel_config: true", "parallelism_config: {cp_size: 2}",
        "datasets: [{path: json, fraction: half}]", "datasets: 3",
    ],
)  # fmt: skip
def test_a_recipes_value_of_a_wrong_type_ends_the_command_with_a_line_that_names_the_setting(tmp_path, line, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_recipe(tmp_path, line)
    assert ended.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert re.search(rf"[`-]{line.partition(':')[0]}\b", said)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("learning_rate: 1e-6", 1e-6),  # text to YAML 1.1
        ("learning_rate: 1", 1), ("max_grad_norm:", None), ("seed: '7'", 7),
        ("save_steps: 0.1", 0.1), ("logging_steps: 0.05", 0.05), ("warmup_steps: 10", 10),
        ("output_dir: '2024'", "2024"), ("system_prompt: --no=1 {x}", "--no=1 {x}"), ("system_prompt: ''", ""),
        ("use_peft: 'yes'", True), ("use_peft: 1", True), ("disable_tqdm: false", False),
        ("report_to: none", []), ("report_to: [wandb, trackio]", ["wandb", "trackio"]), ("hub_strategy: end", "end"),
        ("scale_rewards: false", "none"), ("resume_from_checkpoint: true", True),
        ("reward_funcs: my.reward", ["my.reward"]), ("reward_weights: 1", [1]),
        ("reward_weights: [1, 5e-1]", [1, 0.5]),
        ("lora_target_modules: all-linear", "all-linear"), ("lora_target_modules: [q, v]", ["q", "v"]),
        ("lr_scheduler_kwargs: {min_lr: 1.0e-7}", {"min_lr": 1e-7}),
        ("lr_scheduler_kwargs: '{\"min_lr\": 1e-7}'", {"min_lr": 1e-7}),
    ],
)  # fmt: skip
def test_values_that_trl_and_transformers_accept_are_accepted_in_a_recipe(tmp_path, line, value):
    name = line.partition(":")[0]
    (found,) = (getattr(each, name) for each in parse_recipe(tmp_path, line) if hasattr(each, name))
    assert found == value


@pytest.mark.parametrize("value", ["{split_batches: true}", "'{\"split_batches\": true}'", "{folder}/own.json"])
def test_a_configuration_is_a_mapping_or_the_path_of_a_file(tmp_path, value):
    (tmp_path / "own.json").write_text('{"split_batches": true}')
    settings = parse_recipe(tmp_path, f"accelerator_config: {value.replace('{folder}', str(tmp_path))}")
    assert settings.training.accelerator_config.split_batches
