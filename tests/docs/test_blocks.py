"""Every code block of README and docs: run on stand-ins for the Hub's models and data, or parsed by what reads it."""

import configparser
import json
import re
import runpy
import signal
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

import benchmarks.gpu_first_run.__main__ as gpu_first_run
from bapo_trl import BAPOConfig, BAPOTrainer
from bapo_trl.checkpoints.files import find_defect
from bapo_trl.checkpoints.stop_signals import EXIT_CODE
from bapo_trl.compare import command as compare_command
from bapo_trl.report import command as report_command
from bapo_trl.script import serving
from bapo_trl.script.launcher import read_arguments
from bapo_trl.script.settings import recipes
from bapo_trl.script.settings.parser import parse_arguments
from tests.docs.blocks import PAGES, all_blocks, commands_of
from tests.helpers.commands import ROOT, run_command
from tests.helpers.script_runs import CHAT_TEMPLATE, CPU, fill_folder, train_bapo
from tests.helpers.toy import toy_trainer
from tests.report.made_logs import made_logs, save_run


pytestmark = pytest.mark.processes


BLOCKS = all_blocks()
TO_CHECK = {language: [b for b in BLOCKS if b.language == language and b.reason is None] for language in
            ("bash", "json", "python", "yaml")}  # fmt: skip
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
# What makes a run short, in the place of the model, the data and the length that a page names
SHORT = {**{k: v for k, v in CPU.items() if k not in ("model_name_or_path", "output_dir")}, "logging_steps": "1"}
SHORT |= {"per_device_train_batch_size": "4", "per_device_eval_batch_size": "16", "num_generations": "4"}
SHORT_FLAGS = [part for name, value in SHORT.items() for part in (f"--{name}", value)]
CPU_FLAGS = ["--use_cpu", "true", "--bf16", "false"]
CONFIG = r"(BAPO|GRPO)Config\((?=\n)"
NOT_RUN = {"math_7b", "smollm2_sums", "recipes/smollm2_sums.yaml"}  # vLLM; packages with a model and with tasks
SENTENCES = ["Find 1.", "Find 22.", "Find 3.", "Find 40."] * 32


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with the repository's files, and what the pages take from users and from the Hub."""
    fill_folder(tmp_path, monkeypatch, CHAT_TEMPLATE)
    for name in ("recipes", "accelerate_configs", "deepspeed_configs", "scripts", "train_bapo.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    Path(MODEL).parent.mkdir()
    Path("model").rename(MODEL)
    Path("my_rewards.py").write_text("".join(b.text for b in BLOCKS if b.text.startswith("# my_rewards.py\n")))
    problems = [{"prompt": [{"role": "user", "content": text}], "solution": text[5:-1]} for text in SENTENCES]
    Dataset.from_dict({"prompt": SENTENCES}).to_json("prompts.jsonl")
    questions = Dataset.from_dict({"question": SENTENCES, "answer": [p["solution"] for p in problems]})
    for name in ("math.jsonl", "problems.jsonl", "test.jsonl"):
        questions.to_json(name)
    posed = [{"problem": row["prompt"][0]["content"], **row} for row in problems[:2]]
    for name, rows in (("trl-lib/DeepMath-103K", problems), ("math-ai/aime24", posed)):
        Path(name).mkdir(parents=True)
        Dataset.from_list(rows).to_json(f"{name}/train.jsonl")
    return tmp_path


# Commands


def make(words):
    assert run_command(["make", "--dry-run", "PYTHON=true", *words]).returncode == 0


def pip(words):
    subcommand, *packages = words
    assert subcommand == "install"
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    for package in packages:
        assert (named := re.fullmatch(r"(?:\.|bapo-trl)(?:\[([\w,-]+)\])?", package)), package
        assert not named[1] or set(named[1].split(",")) <= set(setup["options.extras_require"])


def python(words):
    match words:
        case ["-m", "benchmarks.gpu_first_run", *arguments]:
            gpu_first_run.make_parser().parse_args(arguments)
        case ["scripts/submit_slurm.py", *arguments]:
            submit(arguments)
        case ["train_bapo.py", *arguments]:
            train(arguments)
        case _:
            pytest.fail(f"`python {' '.join(words)}` is checked by nothing here")


def train(arguments):
    script_args, training_args, model_args, _ = parse_arguments([*arguments, *CPU_FLAGS])
    if NOT_RUN & set(arguments):
        return
    model = model_args.model_name_or_path
    if model.startswith("outputs/") and not Path(model).exists():  # of an earlier training
        save_adapter(model)
    for name in (script_args.dataset_name, script_args.eval_dataset, model):
        assert name in (None, "embedded") or Path(name).exists(), name
    train_bapo.main([*arguments, *SHORT_FLAGS])
    is_trained = training_args.do_train and not script_args.dry_run
    assert not is_trained or (Path(training_args.output_dir) / "trainer_state.json").exists()


def submit(arguments):
    model = arguments[arguments.index("--model") + 1]
    Qwen2Config(num_attention_heads=28, num_key_value_heads=4).save_pretrained(model)
    with patch("os.chdir"), patch("os.execvpe") as become:
        runpy.run_path(str(ROOT / "scripts" / "submit_slurm.py"))["main"](arguments)
    assert become.call_args.args[1][:3] == ["sbatch", "--nodes=5", "--gpus-per-node=8"]


def save_adapter(path):
    base = AutoModelForCausalLM.from_pretrained(MODEL)
    get_peft_model(base, LoraConfig(target_modules=["q_proj"])).save_pretrained(path)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(path)


def bapo_trl(words):
    match words:
        case ["train", *arguments] if "--accelerate_config" in arguments:
            launch, _, _ = _validate_launch_command(read_arguments(arguments))
            parse_arguments([*launch.training_script_args[1:], *CPU_FLAGS])
        case ["train", *arguments]:
            train(arguments)
        case ["evaluate", *arguments]:
            train([*arguments, "--do_train", "false"])
        case ["serve", *arguments]:
            stand_ins = patch("importlib.util.find_spec"), patch("trl.scripts.vllm_serve.is_vllm_available")
            with stand_ins[0], stand_ins[1], patch("os.execve") as become:
                serving.main(arguments)
            assert become.call_args.args[1][-2:] == ["--tensor-parallel-size", "2"]
        case ["compare", *arguments]:
            (study,) = [block.text for block in TO_CHECK["yaml"] if block.page == "docs/compare.md"]
            Path("my_study.yaml").write_text(study)
            compare_command.main([*arguments, "--dry_run"])  # reads the flags of each arm
        case ["recipes", *arguments]:
            recipes.main(arguments)
        case ["report", *arguments]:
            report_command.main([saved(word) if "/" in word else word for word in arguments])
        case _:
            pytest.fail(f"`bapo-trl {' '.join(words)}` is checked by nothing here")


def saved(run):
    """Return a run that is there, as the shell would make of a pattern."""
    run = run.replace("*", "1")
    if not Path(run).exists():
        save_run(Path(run), made_logs())
    return run


CHECKS = {"make": make, "pip": pip, "python": python, "bapo-trl": bapo_trl}


@pytest.mark.parametrize("block", TO_CHECK["bash"], ids=str)
def test_commands(block, folder):
    commands = commands_of(block.text)
    assert commands
    for words in commands:
        assert words[0] in CHECKS, f"`{words[0]}` is checked by nothing: add a check, or mark the block as not run"
        CHECKS[words[0]](words[1:])


# Other languages


def run_python_block(block) -> dict:
    """Run a block on a short training, and return its names."""
    # The page says to add `use_cpu` where there is no GPU
    names = {"__name__": "block"}
    if not re.search(CONFIG, block.text):  # lines for a script of one's own, which has the trainer
        names |= {"trainer": toy_trainer("out", max_steps=2)} if "trainer" in block.text else {}
        exec(compile(block.text, str(block), "exec"), names)
        return names
    shorter = {
        "use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "max_steps": 2,
        "max_completion_length": 6,
    }  # fmt: skip
    code = re.sub(rf"^ +({'|'.join(shorter)})=.*\n", "", block.text, flags=re.MULTILINE)
    settings = ", ".join(f"{name}={value!r}" for name, value in shorter.items())
    code, count = re.subn(CONFIG, rf"\g<0>{settings},", code)
    assert count == 1
    exec(compile(code, str(block), "exec"), names)
    args = names["trainer"].args
    assert not isinstance(args, BAPOConfig) or args.updates_per_generation in (4, 16)  # as its comments say
    return names


@pytest.mark.parametrize("block", TO_CHECK["python"], ids=str)
def test_python(block, folder):
    names = run_python_block(block)
    is_training = "trainer.train()" in block.text or re.search(CONFIG, block.text)
    assert not is_training or names["trainer"].state.global_step == 2


@pytest.mark.parametrize("block", TO_CHECK["json"], ids=str)
def test_data(block, folder):
    """A line for each row, as the file of its page has it."""
    rows = [json.loads(line) for line in block.text.splitlines()]
    with open("problems.jsonl") as file:
        assert {tuple(row) for row in rows} == {tuple(json.loads(next(file)))}


@pytest.mark.parametrize("block", TO_CHECK["yaml"], ids=str)
def test_settings(block, folder):
    settings = yaml.safe_load(block.text)
    if "arms" in settings:
        return  # a study, which `bapo-trl compare` reads
    quickstart = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text())
    Path("recipe.yaml").write_text(yaml.safe_dump({**quickstart, **settings}))
    _, training_args, *_ = parse_arguments(["--config", "recipe.yaml"])
    assert {name: getattr(training_args, name) for name in settings} == settings


def test_every_block_is_run_or_parsed_or_says_why_not():
    unmarked = [str(block) for block in BLOCKS if block.reason is None and block.language not in TO_CHECK]
    assert unmarked == [], "name its language, or write `<!-- not run: why -->` above it"
    fences = sum(len(re.findall(r"^ *```", page.read_text(), flags=re.MULTILINE)) for page in PAGES)
    assert fences == 2 * len(BLOCKS), "a fence that is not closed, or indented"
    assert all(TO_CHECK.values())


@pytest.mark.parametrize("block", [block for block in TO_CHECK["python"] if "StopSignals" in block.text], ids=str)
def test_an_example_that_stops_on_signals_exits_with_the_code_of_a_run_to_resume(block, folder, monkeypatch):
    original = BAPOTrainer.training_step

    def signalled(*args, **kwargs):
        signal.raise_signal(signal.SIGTERM)
        return original(*args, **kwargs)

    monkeypatch.setattr(BAPOTrainer, "training_step", signalled)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            run_python_block(block)
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert ended.value.code == EXIT_CODE
    (checkpoint,) = folder.glob("*/checkpoint-1")
    assert find_defect(checkpoint) is None
