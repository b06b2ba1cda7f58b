"""Each notebook runs from its first cell to its last, offline, and is committed with what its cells print and draw."""

import ast
import base64
import configparser
import copy
import io
import re

import matplotlib.image
import nbformat
import pytest
from nbformat.v4 import new_code_cell

from notebooks.run import FOLDER, check_storable, code_digest, execute, tidy
from tests.helpers.commands import ROOT


# Smaller than for a reader, so that each takes less than a minute and a half; and the figures of each
NOTEBOOKS = {
    "04_adaptive_bounds.ipynb": ({}, 6),
    "02_finetune_lora.ipynb": ({"UPDATES": 4, "COMPLETIONS": 16, "PROBLEMS": 8}, 1),
    "03_which_method.ipynb": ({"UPDATES": 8, "SEEDS": [0]}, 3),
    "01_your_own_task.ipynb": ({"UPDATES": 4, "COMPLETIONS": 8, "PROBLEMS": 8, "SAMPLES": 4}, 2),
}
DRAWS = re.compile(r"\bplt\.\w+\(|\bImage\(")
RUN = "run `make notebooks`"


def read(name):
    return nbformat.read(FOLDER / name, as_version=4)


def with_parameters(notebook, parameters: dict):
    """Return the notebook with values in place of those in the cell tagged `parameters`, as papermill has it."""
    if parameters:
        (position,) = [i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", [])]
        given = {node.targets[0].id for node in ast.parse(notebook.cells[position].source).body}
        assert set(parameters) <= given
        lines = [f"{name} = {value!r}" for name, value in parameters.items()]
        notebook.cells.insert(position + 1, new_code_cell("\n".join(lines)))
    return notebook


def check_figures(notebook, at_least: int) -> None:
    """Fail if a cell that draws shows no figure or a blank one, or if there are too few."""
    shown = 0
    for cell in notebook.cells:
        outputs = cell.get("outputs", [])
        drawn = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
        assert drawn or cell.cell_type != "code" or not DRAWS.search(cell.source), f"no figure of:\n{cell.source}"
        for encoded in drawn:
            figure = matplotlib.image.imread(io.BytesIO(base64.b64decode(encoded)))  # (height, width, channels)
            assert figure[..., :3].min() < figure[..., :3].max(), f"a blank figure of:\n{cell.source}"
        shown += len(drawn)
    assert shown >= at_least, f"{shown} figures, expected {at_least}"


def check_committed(notebook) -> None:
    """
    Fail if a notebook is not as `make notebooks` leaves it, lacks an output, or does not begin as the others do: it
    installs the package with one of its extras. Outputs that are not to be stored raise a `ValueError`.
    """
    nbformat.validate(notebook)
    assert notebook.metadata.get("bapo_trl") == {"outputs_of": code_digest(notebook)}, RUN
    assert tidy(copy.deepcopy(notebook)) == notebook, RUN
    for cell in notebook.cells:
        if cell.cell_type == "code" and "print(" in cell.source:
            assert any(output.output_type == "stream" for output in cell.outputs), f"{RUN}: no text of\n{cell.source}"
    check_storable(notebook)
    title, install = notebook.cells[:2]
    assert re.match(r"# \w", title.source), title.source
    found = re.search(r'find_spec\("bapo_trl"\) is None:\n    %pip install -q "\.\.\[(\w+)\]"$', install.source)
    assert found, install.source
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert found[1] in setup["options.extras_require"], install.source


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    for name, value in {"HF_HUB_OFFLINE": "1", "PIP_NO_INDEX": "1", "TOKENIZERS_PARALLELISM": "false"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel's own shows figures


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_notebook_runs_and_shows_its_figures(name, tmp_path):
    parameters, num_figures = NOTEBOOKS[name]
    check_figures(execute(with_parameters(read(name), parameters), tmp_path), num_figures)


@pytest.mark.parametrize("name", [path.name for path in FOLDER.glob("*.ipynb")])
def test_the_notebook_is_committed_with_the_outputs_of_its_code(name):
    check_committed(read(name))
    check_figures(read(name), NOTEBOOKS[name][1])
