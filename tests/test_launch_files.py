"""Every YAML file in the repository parses with the parser that reads it."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import prepare_multi_gpu_env

from bapo_trl.errors import InputError
from bapo_trl.script.commands import EVALUATE, SCRIPT, TRAIN
from bapo_trl.script.launcher import SETTINGS_TOO, launch_of, read_arguments, start
from bapo_trl.script.settings.arguments import EMBEDDED
from bapo_trl.script.settings.parser import _Parser, parse_arguments
from tests.helpers.commands import ROOT


RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
ACCELERATE_CONFIGS = sorted((ROOT / "accelerate_configs").iterdir())
DEEPSPEED_CONFIGS = sorted((ROOT / "deepspeed_configs").iterdir())
LAUNCHES = {
    "zero3": (8, "zero3"), "zero3_multinode": (32, "zero3"), "cpu_ddp": (2, "none"), "cpu_zero3": (2, "zero3"),
}  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_ready_to_train_or_evaluate(recipe):
    # Without a GPU, bf16 is rejected: that is for the machine to say, not for the recipe.
    flags = [] if torch.cuda.is_available() else ["--use_cpu", "true", "--bf16", "false"]
    script_args, training_args, model_args, _ = parse_arguments(["--config", str(recipe), *flags])
    if training_args.use_vllm:  # its stale samples stay usable
        assert training_args.vllm_importance_sampling_mode == "token_truncate"
        assert training_args.biased_settings == []
    if not training_args.do_train:
        assert script_args.eval_dataset
        return
    assert script_args.dataset_name
    assert script_args.reward_funcs or script_args.dataset_name in (EMBEDDED, "chat_sums")
    assert model_args.model_name_or_path
    assert training_args.is_always_on_policy == (recipe.stem == "smollm2_sums")  # without a server, on a CPU
    assert not model_args.use_peft or model_args.lora_dropout == 0  # it would be noise on every importance ratio


def test_every_launch_config_is_accounted_for_and_no_setting_has_two_homes():
    assert {path.stem for path in ACCELERATE_CONFIGS} == set(LAUNCHES)
    for path in ACCELERATE_CONFIGS:
        config = yaml.safe_load(path.read_text())
        assert "mixed_precision" not in config  # the trainer's `bf16`
        deepspeed = config.get("deepspeed_config", {})
        assert set(deepspeed) <= {"deepspeed_config_file", "zero3_init_flag", "deepspeed_multinode_launcher"}
        assert (ROOT / deepspeed.get("deepspeed_config_file", path)).is_file()
    trainers_own = {"gradient_accumulation_steps", "gradient_clipping", "train_batch_size"}
    trainers_own |= {"train_micro_batch_size_per_gpu"}
    for path in DEEPSPEED_CONFIGS:
        config = json.loads(path.read_text())
        assert {config[name] for name in trainers_own} == {"auto"}
        assert config["bf16"] == config["fp16"] == {"enabled": "auto"}
        assert not {"optimizer", "scheduler"} & set(config)


@pytest.mark.parametrize("path", ACCELERATE_CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_is_launched_by_its_name_from_any_folder(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # One of the same name in the user's folder is not that of the package
    (tmp_path / "deepspeed_configs").mkdir()
    (tmp_path / "deepspeed_configs" / "zero3.json").write_text("{}")
    arguments = ["--config", "math_7b", "--accelerate_config", path.stem, "--main_process_port", "0", "--seed=1"]
    arguments = read_arguments(arguments)
    arguments, _, _ = _validate_launch_command(arguments)
    processes, engine = LAUNCHES[path.stem]
    assert arguments.num_processes == processes
    assert arguments.multi_gpu == (engine == "none" and processes > 1)
    assert arguments.use_deepspeed == engine.startswith("zero")
    if arguments.use_deepspeed:
        config = ROOT / "deepspeed_configs" / f"{engine}.json"
        assert Path(arguments.deepspeed_config_file) == config.resolve()
    assert (arguments.module, arguments.training_script) == (True, "bapo_trl")
    assert arguments.training_script_args == ["train", "--config", "math_7b", "--seed=1"]


def test_a_configuration_of_ones_own_is_launched_by_its_path(tmp_path):
    own = tmp_path / "mine.yaml"
    own.write_text((ROOT / "accelerate_configs" / "zero3.yaml").read_text())
    assert read_arguments(["--accelerate_config", str(own)]).config_file == str(own)
    given = ["--accelerate_config", "zero3", "--deepspeed_config_file", "other.json"]
    assert read_arguments(given).deepspeed_config_file == "other.json"
    of_trl, _, _ = _validate_launch_command(read_arguments(["--accelerate_config", "zero1"]))
    assert (of_trl.use_deepspeed, of_trl.zero_stage) == (True, 1)
    with pytest.raises(InputError, match=r"`accelerate_config` is 'zero9', which does not exist: .*cpu_ddp,.* fsdp1,"):
        read_arguments(["--accelerate_config", "zero9"])


def test_flags_of_the_launcher_and_of_the_ranks_are_told_apart():
    options = {option.lstrip("-").replace("-", "_") for option in launch_command_parser()._option_string_actions}
    assert options & _Parser(TRAIN).types.keys() == set(SETTINGS_TOO)
    given = ["--gradient-accumulation-steps", "2", "--num-processes=3", "--eval_dataset", "x", "--machine_rank", "1"]
    arguments = read_arguments(given, EVALUATE)
    assert (arguments.num_processes, arguments.machine_rank) == (3, 1)
    of_ranks = ["evaluate", "--gradient-accumulation-steps", "2", "--eval_dataset", "x"]
    assert arguments.training_script_args == of_ranks


@pytest.mark.parametrize("name", ["cpu_ddp", "cpu_zero3"])
def test_ranks_on_cpus_see_no_gpu_of_their_machine(name):
    seen = prepare_multi_gpu_env(launch_of(name))["CUDA_VISIBLE_DEVICES"]
    assert set(seen.split(",")) == {"-1"}  # no device's number


@pytest.mark.parametrize(
    ("seen", "flags", "used"), [(None, [], "0"), ("3,5", [], "3"), ("3,5", ["--gpu_ids", "2"], "2")]
)
def test_one_process_sees_one_gpu(monkeypatch, seen, flags, used):
    environments = []
    monkeypatch.setattr("os.execvpe", lambda file, command, environment: environments.append(environment))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    start(read_arguments(["--accelerate_config", "single_gpu", *flags]))
    assert environments[0]["CUDA_VISIBLE_DEVICES"] == used


@pytest.mark.parametrize("command", [TRAIN, SCRIPT], ids=lambda command: command.name)
def test_the_help_of_the_training_starts_several_processes_with_a_configuration(command, tmp_path, monkeypatch):
    (line,) = (line.strip() for line in command.description.splitlines() if "--accelerate_config" in line)
    assert line.startswith(command.name if command is TRAIN else f"python {command.name}")
    monkeypatch.chdir(tmp_path)
    arguments, _, _ = _validate_launch_command(read_arguments(line.split()[2:]))
    assert arguments.use_deepspeed
    assert arguments.num_processes == 6
    flags = arguments.training_script_args[1:]
    assert parse_arguments([*flags, "--use_cpu", "true", "--bf16", "false"])[1].learning_rate == 1e-6
