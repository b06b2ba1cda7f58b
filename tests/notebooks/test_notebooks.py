"""Each notebook runs from its first cell to its last, offline, and is committed with what its cells print and draw."""

import configparser
import re
import shlex

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from bapo_trl.script.command_line import parse_arguments
from notebooks.run import FOLDER, LIMIT, check_storable, execute, run
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
    program, name, *arguments = shlex.split(command.replace("\\\n", " "))
    assert (program, name) == ("bapo-trl", "train")
    script_args, training_args, *_ = parse_arguments(arguments)
    assert len(script_args.reward_funcs) == len(training_args.reward_weights)


# The checks themselves, on a small notebook

DRAWING = "import matplotlib.pyplot as plt\n\nplt.plot([1, 2])\nplt.show()"
NOISE = "import sys\n\nprint('seen')\nprint('a warning', file=sys.stderr)\n1 + 1"


def test_running_stores_text_and_figures_and_no_more(tmp_path):
    path = tmp_path / "small.ipynb"
    title, install = read("01_adaptive_bounds.ipynb").cells[:2]
    nbformat.write(new_notebook(cells=[title, install, new_code_cell(NOISE), new_code_cell(DRAWING)]), path)
    run(path)
    small = nbformat.read(path, as_version=4)
    check_committed(small, EXTRAS)
    noise, drawing = small.cells[2:]
    assert [output.get("text") or output.data["text/plain"] for output in noise.outputs] == ["seen\n", "2"]
    assert len(figures(drawing)) == 1
    for text, message in (("in /home/user/x.py\n", "cell-03 prints a path"), ("x" * LIMIT, "more than 300,000")):
        noise.outputs[0].text = text
        with pytest.raises(ValueError, match=message):
            check_storable(small)
    noise.source = "1 + 2"
    with pytest.raises(AssertionError, match="run `make notebooks`"):
        check_committed(small, EXTRAS)
