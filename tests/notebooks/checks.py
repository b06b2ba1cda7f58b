"""Run a notebook as a user does, and look for what it should show."""

import ast
import base64
import io
import re
from pathlib import Path

import matplotlib.image
import nbformat
import numpy as np
from nbclient import NotebookClient


DRAWS = re.compile(r"\bplt\.\w+\(|\bImage\(")
CELL_LIMIT_S = 240  # such that a cell that hangs ends the test


def with_parameters(notebook, parameters: dict):
    """Return the notebook with values in place of those in the cell tagged `parameters`, as papermill has it."""
    notebook = nbformat.from_dict(notebook)
    if not parameters:
        return notebook
    (position,) = [i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", [])]
    given = {node.targets[0].id for node in ast.parse(notebook.cells[position].source).body}
    unknown = set(parameters) - given
    assert not unknown, f"no such parameters: {unknown}"
    lines = [f"{name} = {value!r}" for name, value in parameters.items()]
    notebook.cells.insert(position + 1, nbformat.v4.new_code_cell("\n".join(lines)))
    return notebook


def execute(notebook, folder: Path):
    """Run all cells in a folder of its own. A cell that fails raises, with its traceback."""
    NotebookClient(
        notebook,
        timeout=CELL_LIMIT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    ).execute()
    return notebook


def figures(cell) -> list[np.ndarray]:
    """Return the figures that a cell shows, each of shape `(height, width, channels)`."""
    encoded = [output["data"]["image/png"] for output in cell.outputs if "image/png" in output.get("data", {})]
    return [matplotlib.image.imread(io.BytesIO(base64.b64decode(image))) for image in encoded]


def check_figures(notebook, at_least: int) -> None:
    """
    Fail if a cell that draws shows no figure or a blank one, or if there are too few.

    Args:
        notebook (`nbformat.NotebookNode`):
            Notebook that was run.
        at_least (`int`):
            Number of figures that it should show.
    """
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


def check_committed(notebook, name: str) -> None:
    """Fail if a notebook has outputs, or begins without its badge and the line that installs the package."""
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [], f"outputs of this cell are to be stripped:\n{cell.source}"
            assert cell.execution_count is None, f"the count of this cell is to be stripped:\n{cell.source}"
    title, install = notebook.cells[:2]
    assert re.match(
        r"\[!\[Open In Colab\]\(https://colab\.research\.google\.com/assets/colab-badge\.svg\)\]"
        rf"\(https://colab\.research\.google\.com/github/[\w-]+/bapo_trl/blob/main/notebooks/{name}\)\n\n# \w",
        title.source,
    ), title.source
    assert 'find_spec("bapo_trl") is None:\n    %pip install -q "bapo-trl[llm]"' in install.source, install.source
