"""CONTRIBUTING.md, "Imports point one way": who knows of whom in the package. `make quality` runs it."""

import ast
from importlib.util import resolve_name

import pytest

from tests.helpers.commands import ROOT


PACKAGE = ROOT / "bapo_trl"
TOOLS = {"__main__", "cli", "script", "evaluation", "report", "compare", "tasks", "recipes"}
CORE = {path.stem for path in PACKAGE.iterdir() if path.suffix in ("", ".py")} - TOOLS - {"__init__", "__pycache__"}
OF_TOOLS = TOOLS | {"ReportCallback", "dry_run"}  # and what the package exports of them
WINGS = {"replay", "rollouts", "vllm_server"}
TRAINER = {"bapo_trainer", "BAPOTrainer"}  # knows the wings, and they do not know it
UNKNOWN = {
    **dict.fromkeys(sorted(CORE), OF_TOOLS),
    "clip_bounds": {"trl", "upstream"} | OF_TOOLS | WINGS | TRAINER,  # `upstream` is what is relied on of TRL
    **{wing: (OF_TOOLS | WINGS | TRAINER) - {wing} for wing in sorted(WINGS)},
    "script": WINGS,
}


def imported(part: str) -> set[str]:
    """Return what the files of a part import anywhere: names with their modules, those of ours from `bapo_trl` on."""
    names = set()
    for path in [*(PACKAGE / part).rglob("*.py"), *PACKAGE.glob(f"{part}.py")]:
        package = ".".join(path.relative_to(ROOT).parts[:-1])
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                module = resolve_name("." * node.level + (node.module or ""), package)
                names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize(("part", "unknown"), UNKNOWN.items(), ids=UNKNOWN)
def test_imports_point_one_way(part, unknown):
    assert {name for name in imported(part) if name.removeprefix("bapo_trl.").partition(".")[0] in unknown} == set()


LAYERS = ("failures commands console", "settings", "memory", "data", "models rewards", "preparation", "run",
          "plan launcher serving")  # fmt: skip


def test_the_scripts_layers_import_lower_ones():
    above: set[str] = set()
    for layer in reversed(LAYERS):
        found = {name for part in layer.split() for name in imported(f"script/{part}")}
        assert {name for name in found if name.startswith("bapo_trl.script.") and name.split(".")[2] in above} == set()
        above |= {*layer.split()}
    assert above == {path.stem for path in (PACKAGE / "script").iterdir()} - {"__init__", "__pycache__"}


def test_imports_are_found():
    assert {"bapo_trl.replay.buffer.ReplayBuffer", "bapo_trl.report.runs.read_settings"} <= {
        *imported("replay"), *imported("script"), *imported("bapo_trainer")
    }  # fmt: skip
    assert {"bapo_trainer", "batch", "errors", "checkpoints"} <= CORE


def test_the_script_knows_public_names_alone():
    private = [name for name in imported("script") if name.startswith("bapo_trl.") and "._" in name]
    assert [name for name in private if not name.endswith("__")] == []
