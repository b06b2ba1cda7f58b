"""
What is read is never run. That servers listen on loopback is held by tests/script/test_cli.py and
tests/test_launch_files.py.
"""

import ast
import subprocess
from pathlib import Path

import pytest

from bapo_trl import BAPOConfig


ROOT = Path(__file__).parents[1]
SOURCES = [
    ROOT / name
    for name in subprocess.check_output(["git", "ls-files", "*.py"], cwd=ROOT, text=True).splitlines()
    if not name.startswith("tests/")
]
RUN_WHAT_THEY_READ = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def unsafe_reads(source: str) -> list[str]:
    """Return what in a source text could run code from a file that it reads."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [f"imports {name}" for name in names if name.split(".")[0] in RUN_WHAT_THEY_READ]
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if called == "torch.load" and keywords.get("weights_only") != "True":
            found.append("torch.load without weights_only=True")
        if called.endswith(".load") and keywords.get("allow_pickle", "False") != "False":
            found.append("load with allow_pickle")
        if called in ("eval", "exec", "yaml.load", "yaml.unsafe_load", "yaml.full_load"):
            found.append(called)
        if keywords.get("trust_remote_code") == "True":
            found.append("trust_remote_code=True")
        if keywords.get("shell") == "True":
            found.append("shell=True")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=[path.relative_to(ROOT).as_posix() for path in SOURCES])
def test_no_source_runs_what_it_reads(path):
    assert unsafe_reads(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import joblib.numpy_pickle",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "numpy.load(path, allow_pickle=True)",
        "yaml.load(text)",
        "eval(text)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "subprocess.run(line, shell=True)",
    ],
)
def test_the_scan_finds(line):
    assert len(unsafe_reads(line)) == 1


def test_the_code_of_a_model_is_run_only_if_told(tmp_path):
    assert BAPOConfig(output_dir=str(tmp_path), use_cpu=True).trust_remote_code is False


def test_recipes_name_no_code_to_import_or_to_trust():
    recipes = list((ROOT / "bapo_trl" / "recipes").glob("*.yaml"))
    assert recipes
    for recipe in recipes:
        text = recipe.read_text(encoding="utf-8")
        assert "trust_remote_code" not in text, recipe
        assert not any("." in line for line in text.splitlines() if line.startswith("reward_funcs")), recipe
