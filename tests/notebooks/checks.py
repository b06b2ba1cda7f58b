"""Run a notebook as a user does, and look for what it should show."""

import ast
import base64
import copy
import io
import re

import matplotlib.image
import nbformat
import numpy as np

from notebooks.run import check_storable, code_digest, tidy


DRAWS = re.compile(r"\bplt\.\w+\(|\bImage\(")
PRINTS = re.compile(r"\bprint\(")
RUN = "run `make notebooks`"


def with_parameters(notebook, parameters: dict):
    """Return the notebook with values in place of those in the cell tagged `parameters`, as papermill has it."""
    notebook = nbformat.from_dict(notebook)
    if not parameters:
        return notebook
    (position,) = [i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", [])]
    given = {node.targets[0].id for node in ast.parse(notebook.cells[position].source).body}
    assert set(parameters) <= given
    lines = [f"{name} = {value!r}" for name, value in parameters.items()]
    notebook.cells.insert(position + 1, nbformat.v4.new_code_cell("\n".join(lines)))
    return notebook


def figures(cell) -> list[np.ndarray]:
    """Return the figures that a cell shows, each of shape `(height, width, channels)`."""
    encoded = [output["data"]["image/png"] for output in cell.outputs if "image/png" in output.get("data", {})]
    return [matplotlib.image.imread(io.BytesIO(base64.b64decode(image))) for image in encoded]


def check_figures(notebook, at_least: int) -> None:
    """Fail if a cell that draws shows no figure or a blank one, or if there are too few."""
    shown = 0
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        drawn = figures(cell)
        assert drawn or not DRAWS.search(cell.source), f"no figure of this cell:\n{cell.source}"
        for figure in drawn:
            assert figure[..., :3].min() < figure[..., :3].max(), f"a blank figure of this cell:\n{cell.source}"
        shown += len(drawn)
    assert shown >= at_least, f"{shown} figures, expected {at_least}"


def check_committed(notebook, extras: set[str]) -> None:
    """
    Fail if a notebook is not as `make notebooks` leaves it, lacks an output, or does not begin as the others do: it
    installs the package with one of its extras. Outputs that are not to be stored raise a `ValueError`.
    """
    nbformat.validate(notebook)
    assert notebook.metadata.get("bapo_trl") == {"outputs_of": code_digest(notebook)}, RUN
    assert tidy(copy.deepcopy(notebook)) == notebook, RUN
    for cell in notebook.cells:
        if cell.cell_type == "code" and PRINTS.search(cell.source):
            assert any(output.output_type == "stream" for output in cell.outputs), f"{RUN}: no text of\n{cell.source}"
    check_figures(notebook, 0)
    check_storable(notebook)
    title, install = notebook.cells[:2]
    assert re.match(r"# \w", title.source), title.source
    found = re.search(r'find_spec\("bapo_trl"\) is None:\n    %pip install -q "\.\.\[(\w+)\]"$', install.source)
    assert found, install.source
    assert found[1] in extras, install.source
