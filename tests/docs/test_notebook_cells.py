"""The imports of the notebooks; `make test-notebooks` runs them in Jupyter."""

import ast
import importlib
import json
import re

import pytest

from tests.helpers.commands import ROOT


PUBLIC = ("bapo_trl", "bapo_trl.tasks", "bapo_trl.clip_bounds", "bapo_trl.evaluation", "bapo_trl.report")


@pytest.mark.parametrize("notebook", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_imports_public_names_of_ours(notebook):
    cells = json.loads(notebook.read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    nodes = list(ast.walk(ast.parse(re.sub(r"^( *)[%!].*", r"\1pass", code, flags=re.MULTILINE))))
    whole = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    assert not [name for name in whole if name.startswith("bapo_trl")]
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module.startswith("bapo_trl")]
    assert imports
    for node in imports:
        assert node.module in PUBLIC
        module = importlib.import_module(node.module)
        for alias in node.names:
            assert alias.name in module.__all__
            getattr(module, alias.name)
