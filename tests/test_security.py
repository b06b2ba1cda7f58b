"""
What is read is never run: ruff's rules S (pyproject.toml) find pickles, eval, exec, yaml.load and shells. That servers
listen on loopback is held by tests/script/test_cli.py and tests/test_launch_files.py.
"""

import ast
import re

import pytest

from tests.helpers.commands import ROOT, tracked_files


SOURCES = [path for path in tracked_files("*.py") if ROOT / "tests" not in path.parents]
RUNS_WHAT_IT_READS = re.compile(
    r"^torch\.load\((?!.*weights_only=True)|^(joblib|cloudpickle|yaml)\.((unsafe|full)_)?loads?\("
    r"|\b(allow_pickle|trust_remote_code)=True"
)


def unsafe_reads(source: str) -> list[str]:
    """Return the calls of a source text that could run code from a file that they read."""
    calls = [ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [call for call in calls if RUNS_WHAT_IT_READS.search(call)]


@pytest.mark.parametrize("path", SOURCES, ids=[path.relative_to(ROOT).as_posix() for path in SOURCES])
def test_no_source_runs_what_it_reads(path):
    assert unsafe_reads(path.read_text(encoding="utf-8")) == []
