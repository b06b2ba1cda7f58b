"""
What messages of the package, and the text of the pages, tell a reader to type: flags, commands, expressions.

Each is parsed by what takes it, or evaluated on stand-ins. The blocks of the pages are run by `test_blocks`.
"""

import argparse
import ast
import configparser
import inspect
import math
import re
import shlex
import signal
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate.commands.launch import launch_command_parser
from peft import PeftModel

import bapo_trl
from bapo_trl import BAPOConfig, BAPOTrainer, cli
from bapo_trl.compare import command as compare_command
from bapo_trl.report import command as report_command
from bapo_trl.script import serving
from bapo_trl.script.command_line import parse_arguments
from bapo_trl.tasks import character_tokenizer
from bapo_trl.upstream.fixes import end_training
from benchmarks.gpu_first_run import __main__ as gpu_first_run
from tests.docs.blocks import PAGES
from tests.docs.test_names import SETTINGS
from tests.helpers.commands import ROOT
from tests.helpers.toy import digits_reward, toy_dataset, toy_model, toy_trainer


HOLE = "{}"  # what a message fills in
OF_OTHERS = {
    *("api-server-count", "logprobs-mode", "max-logprobs", "max-model-len", "max-num-seqs", "dtype"),  # vLLM
    "max-num-batched-tokens",
    *("weight-transfer-config", "tensor-parallel-size", "enforce-eager", "gpu-memory-utilization"),
    *("kv-cache-memory-bytes", "enable-lora"),
    *("disable-pip-version-check", "no-deps", "only-binary", "quiet", "dest", "index-url", "nv"),  # pip, apptainer
    *("signal", "gpus_per_node", "tensor_parallel_size"),  # sbatch
    *("parts", "chat_model", "minutes", "in_4_bits"),  # benchmarks
}


def messages(files: Iterable[Path] | None = None) -> list[str]:
    """Return the texts of the package, or of some files, that are no docstrings; `{}` stands for what they fill in."""
    texts = []
    for path in sorted((ROOT / "bapo_trl").rglob("*.py") if files is None else files):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        filled = [node for node in nodes if isinstance(node, ast.JoinedStr)]
        parts = [part for node in filled for part in node.values]
        skipped = {*map(id, parts), *(id(node.value) for node in nodes if isinstance(node, ast.Expr))}
        for node in filled:
            texts.append("".join(part.value if isinstance(part, ast.Constant) else HOLE for part in node.values))
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
                texts.append(node.value)
    return texts


def inline_code() -> list[str]:
    """Return what stands between backticks in messages and in the text of the pages."""
    pages = [re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE) for page in PAGES]
    found = [code for text in (*messages(), *pages) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]
    return list(dict.fromkeys(" ".join(code.split()) for code in found))


CODE = inline_code()


def test_flags_exist(monkeypatch):
    parsers = [launch_command_parser(), gpu_first_run.make_parser()]
    monkeypatch.setattr(
        argparse.ArgumentParser, "parse_known_args", lambda self, *_, **__: parsers.append(self) or exit()
    )
    for main in (compare_command.main, report_command.main, serving.main):
        with pytest.raises(SystemExit):
            main([])
    known = SETTINGS | OF_OTHERS | {"config", "help", "traceback", "version", "method", "accelerate_config"}
    known |= {name.lstrip("-") for parser in parsers for action in parser._actions for name in action.option_strings}
    named = {name for text in (*messages(), *CODE) for name in re.findall(r"(?<![\w-])--([a-z][\w-]*[a-z\d])", text)}
    assert sorted(name for name in named if not {name, name.replace("-", "_")} & known) == []


def test_flags_with_a_value_are_read(tmp_path):
    """In messages, those of the script with a plain value: `--do_train false`."""
    flags = {code for code in CODE if re.fullmatch(r"(--\w+ [a-z\d][\w./]*( [a-z_]+)*\s*)+", code)}
    for text in messages():
        flags.update(re.findall(r"--\w+ (?:true|false)\b", text))
    flags = [flag for flag in flags if {name.lstrip("-") for name in flag.split() if name[:2] == "--"} <= SETTINGS]
    assert len(flags) > 10
    own = ["--dataset_name", "d", "--output_dir", str(tmp_path), "--use_cpu", "true", "--bf16", "false"]
    for flag in flags:
        parse_arguments([*own, *shlex.split(flag)])


def test_commands_exist():
    commands = [
        shlex.split(code) for code in CODE if re.match(r"(bapo-trl|make|python|pip install|accelerate) ", code)
    ]
    for text in messages():
        commands += [shlex.split(found) for found in re.findall(r"pip install [^\s:,`)]+", text) if HOLE not in found]
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert len(commands) > 30
    for program, first, *rest in commands:
        if program == "bapo-trl":
            assert first in {*cli.COMMANDS, "COMMAND"}, first
        elif program == "make":
            assert first in targets, first
        elif program == "pip" and "bapo-trl[" in rest[0] + first:
            extras = re.search(r"\[(.*)\]", rest[0])[1].split(",")
            assert set(extras) <= set(setup["options.extras_require"]), rest
        elif program == "python" and first == "-m":
            assert rest[0] in ("build", "twine") or find_spec(rest[0]), rest
        elif program == "python":
            assert (ROOT / first).exists(), first


# Expressions

PROSE = {"1 - epsilon", "tau / (1 + tau)", "exp(logp - old_logp)"}  # formulas
IS_EXPRESSION = re.compile(r"[a-zA-Z_][\w.]*\(.*\)|bapo_trl(\.\w+)+|(model|tokenizer|dataset|trainer)(\.\w+)+")


EXPRESSIONS = [
    code for code in CODE
    if IS_EXPRESSION.fullmatch(code) and HOLE not in code and code not in PROSE and not code.startswith("w_t")
]  # fmt: skip


@pytest.fixture
def names(tmp_path, monkeypatch):
    """What a reader has in a script of their own, right after `import bapo_trl`."""
    for package in ("clip_bounds", "evaluation", "experimental", "report", "tasks"):
        monkeypatch.delattr(bapo_trl, package, raising=False)  # loaded by other tests
    monkeypatch.setattr("bapo_trl.tasks.smollm2.cached_folder", lambda *args: tmp_path / args[0])
    model, tokenizer, dataset = toy_model(), character_tokenizer(), toy_dataset()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    trainer = toy_trainer(tmp_path, max_steps=1)
    return {
        "bapo_trl": bapo_trl, "model": model, "tokenizer": tokenizer, "dataset": dataset, "train_dataset": dataset,
        "args": trainer.args, "reward_funcs": digits_reward, "trainer": trainer, "end_training": end_training,
        "BAPOConfig": BAPOConfig, "signal": signal, "ProcessPoolExecutor": ProcessPoolExecutor, "math": math,
        "train": lambda *args, **kwargs: inspect.signature(BAPOTrainer.train).bind(trainer, *args, **kwargs),
        "PeftModel": SimpleNamespace(from_pretrained=inspect.signature(PeftModel.from_pretrained).bind_partial),
        "StopSignals": bapo_trl.StopSignals, "ReportCallback": bapo_trl.ReportCallback,
    }  # fmt: skip


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_can_be_evaluated(expression, names, tmp_path):
    if "dry_run" in expression:
        names["model"] = str(tmp_path / "model")
    eval(expression, names)
