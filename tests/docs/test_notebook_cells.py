"""The imports of the notebooks; `make test-notebooks` runs them in Jupyter."""

import ast
import importlib
import json
import re

import pytest

from tests.helpers.commands import ROOT


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PUBLIC = ("bapo_trl", "bapo_trl.tasks", "bapo_trl.clip_bounds", "bapo_trl.evaluation", "bapo_trl.report")


def _code(notebook):
    cells = json.loads(notebook.read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return [re.sub(r"^( *)[%!].*", r"\1pass", source, flags=re.MULTILINE) for source in sources]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_imports_public_names_of_ours(notebook):
    imports = [name for source in _code(notebook) for name in _of_ours(source)]
    assert imports
    for module, name in imports:
        assert module in PUBLIC, f"{module} is not public"
        assert name in importlib.import_module(module).__all__, f"{module}.{name} is not public"
        getattr(importlib.import_module(module), name)


def _of_ours(source):
    """Return what a cell imports of the package, as module and name; None for the module itself."""
    imports: list = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imports += [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imports += [(node.module, alias.name) for alias in node.names]
    return [(module, name) for module, name in imports if module.partition(".")[0] == "bapo_trl"]
