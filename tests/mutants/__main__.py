"""
Break the package in some places, one at a time, and see which tests notice.

    python -m tests.mutants                 # each mutant against the test files of its part
    python -m tests.mutants --part replay

Of those files, the tests of `make test` run first, and those of `make test-all` if none of them fails; before the
mutants of a part, both have to pass without one. Each mutant is made in a copy of the tree, in a folder for temporary
files. A mutant is found by the name of its function or method, so it survives a move to another file.
"""

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.table import PARTS, TESTS, Mutant


ROOT = Path(__file__).resolve().parents[2]
SUITES = {"make test": "not slow", "make test-all": "slow"}
COPIED = ("bapo_trl", "tests", "benchmarks", "compat", "docs", "scripts", "notebooks", "accelerate_configs",
          "deepspeed_configs", "setup.cfg", "pyproject.toml", "train_bapo.py", "README.md",
          "constraints.txt", "constraints-e2e.txt", "mkdocs.yml", "Makefile", "CITATION.cff", "CHANGELOG.md",
          "CONTRIBUTING.md", "MANIFEST.in", "LICENSE")  # fmt: skip


def find(mutant: Mutant, package: Path) -> tuple[Path, str]:
    """
    Return the file of a mutant, and what it is to hold.

    Raises:
        LookupError: If not exactly one function or method of the name holds the text exactly once.
    """
    found = []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for name, node in _functions(ast.parse(text)):
            segment = ast.get_source_segment(text, node)
            if name == mutant.symbol and segment.count(mutant.before) == 1:
                found.append((path, text.replace(segment, segment.replace(mutant.before, mutant.after))))
    if len(found) != 1:
        raise LookupError(f"{mutant.symbol}: {len(found)} places hold {mutant.before!r} once")
    return found[0]


def _functions(tree: ast.AST, prefix: str = ""):
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield f"{prefix}{node.name}", node


def failing_suite(files: list[str], mutant: Mutant | None = None) -> str | None:
    """Return the first suite with a test that fails on a copy of the tree, with a mutant or whole; `None` if none."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        tree.mkdir()
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, tree / name)
        (tree / "recipes").symlink_to("bapo_trl/recipes")
        if mutant is not None:
            path, text = find(mutant, tree / "bapo_trl")
            path.write_text(text, encoding="utf-8")
        return next((suite for suite, markers in SUITES.items() if _fails(tree, [*files, "-m", markers])), None)


def _fails(tree: Path, arguments: list[str]) -> bool:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if result.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise RuntimeError(f"pytest ended with {result.returncode}:\n{result.stdout[-2000:]}{result.stderr[-2000:]}")
    return result.returncode == pytest.ExitCode.TESTS_FAILED


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=list(PARTS), action="append")
    args = parser.parse_args()
    caught = Counter()
    for part in args.part or PARTS:
        if suite := failing_suite(TESTS[part]):
            raise RuntimeError(f"{part}: tests of `{suite}` fail without a mutant, so that they would tell nothing")
        for mutant in PARTS[part]:
            suite = failing_suite(TESTS[part], mutant)
            caught[suite] += 1
            print(f"{part:<12} {suite or 'SURVIVED':<14} {mutant.symbol}: {mutant.after}", flush=True)
    print(f"{caught['make test']} of {caught.total()} caught by make test, {caught['make test-all']} by make test-all")
    return caught[None]


if __name__ == "__main__":
    sys.exit(min(1, main()))
