"""
Run the notebooks, each in a folder of its own, and store in them what their cells print and draw.

    python notebooks/run.py [NAME ...]  # all by default; `make notebooks` does it

A notebook names the code that its outputs are of: after a change of text it need not be run again.
"""

import base64
import hashlib
import io
import json
import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image


FOLDER = Path(__file__).resolve().parent
LIMIT = 300_000  # bytes of a notebook
CELL_LIMIT_S = 600  # such that a cell that hangs ends the run
NOT_TO_STORE = {
    "a path of a machine": re.compile(r"(?<![\w.:/~])/[\w.-]+/[\w.-]|\b[A-Z]:\\|site-packages"),
    "a timing": re.compile(r"\d ?(s/it|it/s|ms|seconds?)\b|\b\d+:\d\d:\d\d\b|_runtime"),
}


def execute(notebook, folder: Path):
    """Run all cells in a folder. A cell that fails raises, with its traceback."""
    NotebookClient(
        notebook,
        timeout=CELL_LIMIT_S,
        kernel_name="python3",
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    ).execute()
    return notebook


def code_digest(notebook) -> str:
    """Return what tells the code of a notebook from other code."""
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()


def tidy(notebook):
    """Keep what readers see: text that is printed or returned, and figures; no counts, widgets and warnings."""
    for number, cell in enumerate(notebook.cells, start=1):
        cell.id = f"cell-{number:02d}"
        cell.metadata = {key: value for key, value in cell.metadata.items() if key == "tags"}
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = list(filter(None, map(_kept, cell.outputs))), None
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        **{key: value for key, value in notebook.metadata.items() if key == "bapo_trl"},
    }
    return nbformat.from_dict(notebook)


def _kept(output):
    if output.output_type == "stream":
        return output if output.name == "stdout" else None
    data = output.get("data", {})
    if "image/png" in data:
        return nbformat.v4.new_output("display_data", {"image/png": _smaller(data["image/png"])})
    if output.output_type == "execute_result" and set(data) == {"text/plain"}:
        return nbformat.v4.new_output("execute_result", data)
    return None


def _smaller(encoded: str) -> str:
    """Return a PNG with a palette, which takes a third of the bytes, both in base64."""
    image = Image.open(io.BytesIO(base64.b64decode(encoded)))
    if image.mode == "P":
        return encoded
    file = io.BytesIO()
    image.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def check_storable(notebook) -> None:
    """
    Reject outputs that hold a path of a machine or a timing, and a notebook that is too large.

    Raises:
        ValueError: With the cell.
    """
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            text = output.get("text") or output.get("data", {}).get("text/plain", "")
            for what, pattern in NOT_TO_STORE.items():
                if found := pattern.search(text):
                    line = next(line for line in text.splitlines() if found[0] in line)
                    raise ValueError(f"{cell.id} prints {what}: {line!r}\n{cell.source}")
    size = len(nbformat.writes(notebook).encode())
    if size > LIMIT:
        largest = max(notebook.cells, key=lambda cell: len(json.dumps(cell)))
        raise ValueError(
            f"{size:,} bytes, more than {LIMIT:,}; most are of {largest.id}: draw less or smaller.\n{largest.source}"
        )


def run(path: Path) -> None:
    """Run a notebook and store its outputs."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        notebook = tidy(execute(notebook, Path(folder)))
    notebook.metadata["bapo_trl"] = {"outputs_of": code_digest(notebook)}
    check_storable(notebook)
    nbformat.write(notebook, path)
    print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    os.environ.pop("MPLBACKEND", None)  # the kernel's own shows figures
    for name in sys.argv[1:] or sorted(path.name for path in FOLDER.glob("*.ipynb")):
        run(FOLDER / name)
