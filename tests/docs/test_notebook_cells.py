"""The first notebook's code, run as a script, and the imports of all; `make test-notebooks` runs them in Jupyter."""

import ast
import json
import re

import matplotlib as mpl
import pytest

from tests.helpers.commands import ROOT


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def _code(notebook):
    cells = json.loads(notebook.read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return [re.sub(r"^( *)[%!].*", r"\1pass", source, flags=re.MULTILINE) for source in sources]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_a_notebook_imports_of_ours_is_there(notebook):
    imports = [node for source in _code(notebook) for node in ast.walk(ast.parse(source)) if _is_ours(node)]
    assert imports
    for node in imports:
        exec(ast.unparse(node), {})


def _is_ours(node):
    return isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "bapo_trl"


def test_the_first_notebook_searches_and_shows_bounds_that_meet_the_target(monkeypatch, capsys):
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: None)
    mpl.use("Agg")
    names: dict = {}
    for source in _code(ROOT / "notebooks" / "01_adaptive_bounds.ipynb"):
        exec(source, names)
    assert "target met: True" in capsys.readouterr().out
    assert names["bounds"].positive_share >= names["TARGET"] > names["bounds"].initial_positive_share
