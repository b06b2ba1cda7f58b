"""Each notebook runs from its first cell to its last, offline, and shows its figures."""

import re
import runpy
import shlex

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from bapo_trl.script.command_line import parse_arguments
from tests.helpers.commands import ROOT
from tests.notebooks.checks import check_committed, check_figures, execute, with_parameters


FOLDER = ROOT / "notebooks"
tidy = runpy.run_path(str(FOLDER / "tidy.py"))["tidy"]
# Smaller than for a reader, so that each takes less than a minute and a half; and the figures of each
NOTEBOOKS = {
    "01_adaptive_bounds.ipynb": ({}, 6),
    "02_finetune_lora.ipynb": ({"UPDATES": 4, "COMPLETIONS": 16, "PROBLEMS": 8}, 1),
    "03_stale_samples.ipynb": ({"UPDATES": 16, "STALENESS": [2, 4, 8], "COMPLETIONS": 64}, 5),
    "04_your_own_task.ipynb": ({"UPDATES": 4, "COMPLETIONS": 8, "PROBLEMS": 8, "SAMPLES": 4}, 2),
}


def read(name):
    return nbformat.read(FOLDER / name, as_version=4)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    for name, value in {"HF_HUB_OFFLINE": "1", "PIP_NO_INDEX": "1", "TOKENIZERS_PARALLELISM": "false"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel's own shows figures


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_notebook_runs_and_shows_its_figures(name, tmp_path):
    parameters, num_figures = NOTEBOOKS[name]
    check_figures(execute(with_parameters(read(name), parameters), tmp_path), num_figures)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_notebook_is_committed_without_outputs_and_with_its_badge(name):
    check_committed(read(name), name)
    text = (FOLDER / name).read_text()
    assert tidy(text, name) == text, "run `python notebooks/tidy.py`"


def test_every_notebook_is_run():
    assert {path.name for path in FOLDER.glob("*.ipynb")} == set(NOTEBOOKS)


def test_the_command_of_the_last_notebook_is_one(monkeypatch):
    monkeypatch.chdir(ROOT)
    (command,) = [
        block
        for cell in read("04_your_own_task.ipynb").cells
        for block in re.findall(r"```bash\n(.*?)```", cell.source, flags=re.DOTALL)
    ]
    python, script, *arguments = shlex.split(command.replace("\\\n", " "))
    assert (python, script) == ("python", "train_bapo.py")
    script_args, training_args, *_ = parse_arguments(arguments)
    assert len(script_args.reward_funcs) == len(training_args.reward_weights)


# The checks themselves, on small notebooks

DRAWING = "import matplotlib.pyplot as plt\n\nplt.plot([1, 2])\nplt.show()"
CLOSED = "import matplotlib.pyplot as plt\n\nplt.plot([1, 2])\nplt.close()"
EMPTY = "import matplotlib.pyplot as plt\n\nplt.figure().add_axes((0, 0, 1, 1)).set_axis_off()\nplt.show()"


def made(*sources):
    return new_notebook(cells=[new_code_cell(source) for source in sources])


def test_a_failing_cell_fails(tmp_path):
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        execute(made("1 + 1", "1 / 0"), tmp_path)


def test_a_missing_a_blank_and_too_few_figures_fail(tmp_path):
    notebook = execute(made(DRAWING, CLOSED, EMPTY), tmp_path)
    drawing, closed, empty = notebook.cells
    check_figures(new_notebook(cells=[drawing]), 1)
    with pytest.raises(AssertionError, match=r"1 figures, expected 2"):
        check_figures(new_notebook(cells=[drawing]), 2)
    with pytest.raises(AssertionError, match="no figure of this cell"):
        check_figures(new_notebook(cells=[drawing, closed]), 1)
    with pytest.raises(AssertionError, match="a blank figure"):
        check_figures(new_notebook(cells=[drawing, empty]), 1)


def test_parameters_take_the_place_of_those_of_the_reader():
    parameters = new_code_cell("SIZE = 64  # rows\nNAME = 'a'", metadata={"tags": ["parameters"]})
    notebook = new_notebook(cells=[new_markdown_cell("# Title"), parameters, new_code_cell("SIZE")])
    assert [cell.source for cell in with_parameters(notebook, {"SIZE": 4}).cells[2:]] == ["SIZE = 4", "SIZE"]
    with pytest.raises(AssertionError, match="LENGTH"):
        with_parameters(notebook, {"LENGTH": 4})


def test_a_notebook_that_was_run_is_not_as_committed_until_it_is_tidied():
    name = "01_adaptive_bounds.ipynb"
    notebook = read(name)
    notebook.cells[1].outputs = [nbformat.v4.new_output("stream", text="done")]
    with pytest.raises(AssertionError, match="outputs of this cell"):
        check_committed(notebook, name)
    notebook.cells[1].outputs = []
    notebook.cells[1].execution_count = 3
    with pytest.raises(AssertionError, match="count of this cell"):
        check_committed(notebook, name)
    notebook.cells[0].source = notebook.cells[0].source.replace(name, "another.ipynb")
    assert tidy(nbformat.writes(notebook), name) == (FOLDER / name).read_text()


@pytest.mark.parametrize("lost", ["badge", "installation"])
def test_a_notebook_without_its_first_lines_fails(lost):
    name = "01_adaptive_bounds.ipynb"
    notebook = read(name)
    if lost == "badge":
        notebook.cells[0].source = notebook.cells[0].source.partition("\n\n")[2]
    else:
        del notebook.cells[1]
    with pytest.raises(AssertionError):
        check_committed(notebook, name)
