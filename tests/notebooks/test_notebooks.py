"""Each notebook runs from its first cell to its last, offline, and is committed with what its cells print and draw."""

import configparser
import copy
import re
import shlex

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from bapo_trl.script.command_line import parse_arguments
from notebooks.run import FOLDER, LIMIT, code_digest, execute, run, tidy
from tests.helpers.commands import ROOT
from tests.notebooks.checks import check_committed, check_figures, figures, with_parameters


# Smaller than for a reader, so that each takes less than a minute and a half; and the figures of each
NOTEBOOKS = {
    "01_adaptive_bounds.ipynb": ({}, 6),
    "02_finetune_lora.ipynb": ({"UPDATES": 4, "COMPLETIONS": 16, "PROBLEMS": 8}, 1),
    "03_which_method.ipynb": ({"UPDATES": 8, "SEEDS": [0]}, 3),
    "04_your_own_task.ipynb": ({"UPDATES": 4, "COMPLETIONS": 8, "PROBLEMS": 8, "SAMPLES": 4}, 2),
}


setup = configparser.ConfigParser()
setup.read(ROOT / "setup.cfg")
EXTRAS = set(setup["options.extras_require"])


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
def test_the_notebook_is_committed_with_the_outputs_of_its_code(name):
    check_committed(read(name), EXTRAS)
    check_figures(read(name), NOTEBOOKS[name][1])


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


TITLE, INSTALL = read("01_adaptive_bounds.ipynb").cells[:2]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A small notebook as `make notebooks` leaves it."""
    path = tmp_path_factory.mktemp("notebooks") / "small.ipynb"
    noise = "import sys\n\nprint('seen')\nprint('a warning', file=sys.stderr)\n1 + 1"
    nbformat.write(new_notebook(cells=[TITLE, INSTALL, new_code_cell(noise), new_code_cell(DRAWING)]), path)
    run(path)
    return nbformat.read(path, as_version=4)


@pytest.fixture
def small(stored):
    return copy.deepcopy(stored)


def test_running_stores_text_and_figures_and_no_more(small):
    check_committed(small, EXTRAS)
    noise, drawing = small.cells[2:]
    assert [output.get("text") or output.data["text/plain"] for output in noise.outputs] == ["seen\n", "2"]
    assert len(figures(drawing)) == 1
    small.cells[0].source += "\n\nMore text."
    check_committed(small, EXTRAS)


def test_what_a_browser_or_an_editor_leaves_is_not_stored():
    html = {"text/html": "<progress>", "text/plain": "<IPython.core.display.HTML object>"}
    cell = new_code_cell("bar()", execution_count=3, metadata={"tags": ["kept"], "collapsed": True})
    cell.outputs = [new_output("display_data", html), new_output("execute_result", html)]
    tidied = tidy(new_notebook(cells=[cell], metadata={"widgets": {}})).cells[0]
    assert (tidied.outputs, tidied.execution_count, tidied.metadata) == ([], None, {"tags": ["kept"]})


def test_a_path_of_the_machine_is_not_stored(tmp_path):
    nbformat.write(made("1 + 1", "import os\n\nprint(os.getcwd())"), tmp_path / "path.ipynb")
    before = (tmp_path / "path.ipynb").read_text()
    with pytest.raises(ValueError, match=r"cell-02 prints a path(.|\n)*os\.getcwd"):
        run(tmp_path / "path.ipynb")
    assert (tmp_path / "path.ipynb").read_text() == before


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("in /home/user/x.py", "a path"),
        ("'/tmp/x'", "a path"),
        ("python3.11/site-packages/torch", "a path"),
        ("C:\\Users", "a path"),
        ("{'train_runtime': 3.5}", "a timing"),
        ("10 updates, 12.5 s/it", "a timing"),
        ("left 0:01:20", "a timing"),
    ],
)
def test_a_committed_path_or_timing_fails(small, text, what):
    small.cells[2].outputs[0].text = f"{text}\n"
    with pytest.raises(ValueError, match=f"cell-03 prints {what}"):
        check_committed(small, EXTRAS)


@pytest.mark.parametrize("text", ["loss / updates", "https://example.org/a/b", "runs/report.png", "27 [0.6/0.9]"])
def test_other_slashes_are_no_path(small, text):
    small.cells[2].outputs[0].text = f"{text}\n"
    check_committed(small, EXTRAS)


def test_a_notebook_that_is_too_large_fails(small):
    small.cells[2].outputs[0].text = "x" * LIMIT
    with pytest.raises(ValueError, match=r"more than 300,000; most are of cell-03"):
        check_committed(small, EXTRAS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda cells: cells[2].update(source="1 + 2"), "run `make notebooks`"),
        (lambda cells: cells[2].update(execution_count=3), "run `make notebooks`"),  # as a browser leaves it
        (lambda cells: cells[2].update(outputs=[]), "no text of"),
        (lambda cells: cells[3].update(outputs=[]), "no figure of"),
        (lambda cells: cells[0].update(source="[![Open](badge.svg)](example.org)\n\n# Title"), "Open"),
    ],
    ids=["code", "count", "text", "figure", "badge"],
)
def test_what_is_not_as_it_is_committed_fails(small, change, message):
    change(small.cells)
    with pytest.raises(AssertionError, match=message):
        check_committed(small, EXTRAS)


def test_an_installation_that_does_not_work_from_a_checkout_fails(small):
    with pytest.raises(AssertionError, match="find_spec"):
        check_committed(small, EXTRAS - {"plots"})
    small.cells[1].source = small.cells[1].source.replace("..[", "bapo-trl[")
    small.metadata["bapo_trl"] = {"outputs_of": code_digest(small)}
    with pytest.raises(AssertionError, match="find_spec"):
        check_committed(small, EXTRAS)
