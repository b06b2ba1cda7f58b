"""docs/design.md, "Imports point one way": who knows of whom in the package."""

import ast
from importlib.util import resolve_name

import pytest

from tests.helpers.commands import ROOT


PACKAGE = ROOT / "bapo_trl"
WINGS = ("replay", "rollouts", "vllm_server")
ABOVE = {"bapo_trainer", "BAPOTrainer", "script", "cli"}  # the trainer knows the wings; the others know the trainer
UNKNOWN = {
    "clip_bounds": {"trl", "upstream", *WINGS, *ABOVE},  # `upstream` is what is relied on of TRL
    **{wing: {*WINGS, *ABOVE} - {wing} for wing in WINGS},
    "report": {"trl", "torch"} | {path.stem for path in PACKAGE.iterdir()} - {"report", "errors"},
    "script": set(WINGS),
}


def imported(part: str) -> set[str]:
    """Return what the files of a part import anywhere: names with their modules, those of ours from `bapo_trl` on."""
    names = set()
    for path in (PACKAGE / part).rglob("*.py"):
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
    names = imported(part)
    assert any(name.startswith(f"bapo_trl.{part}.") for name in names)  # its own
    assert {name for name in names if name.removeprefix("bapo_trl.").partition(".")[0] in unknown} == set()


def test_the_script_knows_public_names_alone():
    assert [name for name in imported("script") if name.startswith("bapo_trl.") and "._" in name] == []
