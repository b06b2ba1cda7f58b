"""The first notebook's code, run as a script; `make test-notebooks` runs all of them in Jupyter."""

import json
import re

import matplotlib as mpl

from tests.helpers.commands import ROOT


def test_the_first_notebook_searches_and_shows_bounds_that_meet_the_target(monkeypatch, capsys):
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: None)
    mpl.use("Agg")
    cells = json.loads((ROOT / "notebooks" / "01_adaptive_bounds.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names: dict = {}
    for source in sources:
        exec(re.sub(r"^( *)%.*", r"\1pass", source, flags=re.MULTILINE), names)
    assert "target met: True" in capsys.readouterr().out
    assert names["bounds"].positive_share >= names["TARGET"] > names["bounds"].initial_positive_share
