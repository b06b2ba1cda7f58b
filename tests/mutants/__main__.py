"""
Break the package in forty places, one at a time, and see which tests notice.

    python -m tests.mutants                      # each mutant against the test files of its part
    python -m tests.mutants --part replay
    python -m tests.mutants --tests "-m fast"    # each against these arguments of pytest instead

Each mutant is made in a copy of the tree, in a folder for temporary files. A mutant is found by the name of its
function or method, so it survives a move to another file.
"""

import argparse
import ast
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.mutants.table import PARTS, TESTS, Mutant


ROOT = Path(__file__).resolve().parents[2]
COPIED = ("bapo_trl", "tests", "benchmarks", "compat", "docs", "scripts", "notebooks", "accelerate_configs",
          "deepspeed_configs", "setup.cfg", "pyproject.toml", "train_bapo.py", "demo_llm.py", "README.md",
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


def is_caught(mutant: Mutant, tests: list[str]) -> bool:
    """Return whether a test fails on a copy of the tree with this mutant."""
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
        path, text = find(mutant, tree / "bapo_trl")
        path.write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        result = subprocess.run(command, cwd=tree, env=_environment(tree), capture_output=True, text=True)
    if result.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {result.returncode}:\n{result.stdout[-2000:]}{result.stderr[-2000:]}")
    return result.returncode == 1


def _environment(tree: Path) -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=list(PARTS), action="append")
    parser.add_argument("--tests", help="arguments of pytest, in place of the test files of the part")
    args = parser.parse_args()
    survivors, count = [], 0
    for part in args.part or PARTS:
        for mutant in PARTS[part]:
            tests = args.tests.split() if args.tests else TESTS[part]
            caught = is_caught(mutant, tests)
            count += 1
            survivors += [] if caught else [mutant]
            print(f"{part:<12} {'caught' if caught else 'SURVIVED':<9} {mutant.symbol}: {mutant.after}", flush=True)
    print(f"{count - len(survivors)} of {count} caught")
    return len(survivors)


if __name__ == "__main__":
    sys.exit(min(1, main()))
