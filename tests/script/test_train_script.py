"""Training and evaluation as users start them: in a process of its own, on the embedded task and on their own data."""

import json
import re
import sys

import pytest
import yaml
from transformers import AutoModelForCausalLM

from bapo_trl.script.commands import EVALUATE, TRAIN
from bapo_trl.script.settings.parser import parse_arguments
from bapo_trl.script.settings.recipes import RECIPES
from tests.helpers.commands import ROOT, accelerate_launcher, run_command, succeeded
from tests.helpers.forked import run_python
from tests.helpers.script_runs import run


SHORT = {
    "config": "quickstart",
    "max_steps": 2,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 2,
    "num_iterations": 1,
    "num_generations": 4,
    "logging_steps": 1,
}


def train(output_dir, command_line=(), program=(str(ROOT / "train_bapo.py"),), **settings):
    arguments = [f"--{name}={value}" for name, value in {**SHORT, "output_dir": output_dir, **settings}.items()]
    if command_line:
        return run_command([*command_line, *program, *arguments], HF_HUB_OFFLINE="1")
    return run_python([*program, *arguments])


def logs(output_dir):
    return json.loads((output_dir / "trainer_state.json").read_text())["log_history"]


def test_two_updates_on_the_embedded_task(tmp_path):
    out = succeeded(train(tmp_path / "run", command_line=[sys.executable]))
    for line in (
        r"samples per generation +16 \(4 per prompt\)",
        r"samples per update +8 \(1 process x 8 x 1 micro-batches\)",
        r"clip bounds +lower 0.6 to 0.9, upper 1.2 to 3\n",
        r"search +search_order upper_first, search_scope carried_over\n",
        r"\n +update  reward .*\n1/2  50%   0\.\d+ .* 0\.\d+-\d\.\d+ ",
        rf"Evaluation of {tmp_path / 'run'} on the embedded task \(sums of two numbers\)\n  number of prompts: 513; ",
        r"\n +before +after\n  avg@4   0\.\d+ ± 0\.\d+  0\.\d+ ± 0\.\d+\n  pass@2 ",
        rf"Model: {tmp_path / 'run'}\n",
        rf"Saved {tmp_path / 'run' / 'checkpoint-2'}\n",
        rf"Report: {tmp_path / 'run' / 'report.png'}\n",
    ):
        assert re.search(line, out), (line, out)
    assert (tmp_path / "run" / "report.png").read_bytes()[:4] == b"\x89PNG"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run").config.model_type == "qwen2"
    assert [log["step"] for log in logs(tmp_path / "run") if "bapo/clip_low" in log] == [1, 2]


@pytest.mark.processes
def test_resume_trains_on_from_the_latest_whole_checkpoint(tmp_path):
    succeeded(train(tmp_path / "stopped", max_steps=2, save_strategy="steps", save_steps=2))
    (tmp_path / "stopped" / "checkpoint-4").mkdir()
    result = train(tmp_path / "stopped", max_steps=4, resume_from_checkpoint="true")
    out = succeeded(result)
    assert result.stderr.count("checkpoint-4 is not complete and was skipped: trainer_state.json is missing") == 1
    succeeded(train(tmp_path / "straight", max_steps=4))
    assert [log["step"] for log in logs(tmp_path / "stopped") if "bapo/clip_low" in log] == [1, 2, 3, 4]
    for resumed, straight in zip(logs(tmp_path / "stopped"), logs(tmp_path / "straight"), strict=True):
        assert resumed.get("grad_norm") == straight.get("grad_norm")
        assert resumed.get("bapo/positive_share") == straight.get("bapo/positive_share")
    before = [json.loads((tmp_path / run / "eval_results.json").read_text()) for run in ("stopped", "straight")]
    assert before[0]["before_avg@4"] == before[1]["before_avg@4"]  # of the start, not of the checkpoint
    assert "after\n  avg@4" in out
    assert f"Saved {tmp_path / 'stopped' / 'checkpoint-4'}" in out


@pytest.mark.parametrize("command", [TRAIN, EVALUATE], ids=lambda command: command.name)
def test_the_quickstart_stands_in_without_any_argument_alone(command):
    script_args, training_args, model_args, _ = parse_arguments([], command)
    assert (script_args.dataset_name, model_args.model_name_or_path) == ("embedded", "embedded")
    assert (training_args.output_dir, training_args.do_train) == ("outputs/quickstart", command is not EVALUATE)
    cpu = ["--use_cpu", "true", "--bf16", "false"]
    for flags in ([], ["--model_name_or_path", "M"], ["--reward_funcs", "f"], ["--max_steps", "3"], ["--method=grpo"]):
        script_args, training_args, _, _ = parse_arguments([*flags, *cpu], command)
        assert (script_args.dataset_name, training_args.max_completion_length) == (None, 512), flags
    script_args, training_args, model_args, _ = parse_arguments(["--dataset-name=data.jsonl", *cpu], command)
    assert (script_args.dataset_name, training_args.learning_rate) == ("data.jsonl", 1e-6)
    assert model_args.model_name_or_path is None


def test_recipes_by_name_and_by_path_of_which_a_file_of_the_users_comes_first(tmp_path, monkeypatch):
    assert (ROOT / "recipes").resolve() == RECIPES
    monkeypatch.chdir(tmp_path)
    named = ("recipes/quickstart.yaml", "quickstart.yaml", "quickstart", str(RECIPES / "quickstart.yaml"))
    for flags in (*([f"--config={name}"] for name in named), ["--config", "quickstart"]):
        assert parse_arguments([*flags, "--max_steps=480"])[1].learning_rate == 5e-4
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "quickstart.yaml").write_text("learning_rate: 1.0e-3\nuse_cpu: true\nbf16: false\n")
    assert parse_arguments(["--config", "recipes/quickstart.yaml"])[1].learning_rate == 1e-3
    assert parse_arguments(["--config", "quickstart"])[1].learning_rate == 5e-4


@pytest.mark.processes
def test_two_processes_share_the_work(tmp_path):
    program = ["-m", "bapo_trl", "train"]  # as users of an installed package launch it
    out = succeeded(train(tmp_path, command_line=[sys.executable, *accelerate_launcher("cpu_ddp")], program=program))
    assert re.search(r"samples per update +16 \(2 processes x 8 x 1 micro-batches\)", out)
    assert out.count("BAPO on the embedded task") == 1
    assert [log["step"] for log in logs(tmp_path) if "bapo/clip_low" in log] == [1, 2]
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.trainings
def test_a_dataset_mixture_from_a_recipe(folder, capsys):
    parts = [{"path": "json", "data_files": f"{name}.jsonl"} for name in ("train", "test")]
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"datasets": parts}))
    run(config="recipe.yaml", logging_steps=1)
    assert "BAPO on a dataset mixture" in capsys.readouterr().out
    assert [log["step"] for log in logs(folder / "out") if "bapo/clip_low" in log] == [1, 2]
