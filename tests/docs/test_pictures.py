"""The scripts that draw pictures of the documentation from results and formulas: they run and agree with the pages."""

import runpy

import numpy as np
import pytest
from PIL import Image

from tests.helpers.commands import ROOT


TOOLS = ROOT / "docs" / "tools"


@pytest.mark.parametrize("name", ["clipping", "contribution", "layout", "losses", "timeline"])
def test_pictures_are_drawn(name, tmp_path):
    script = runpy.run_path(str(TOOLS / f"draw_{name}.py"))
    script["draw"](tmp_path / "drawn.png")
    with Image.open(tmp_path / "drawn.png") as drawn, Image.open(script["PICTURE"]) as published:
        assert drawn.size == published.size


def test_the_bounds_raise_the_positive_contribution_as_the_page_says():
    reached = runpy.run_path(str(TOOLS / "draw_contribution.py"))["positive_contribution"]
    spread = np.array([0.5])
    assert reached(spread, 0.6, 1.2).round(2) == 0.25
    assert reached(spread, 0.9, 3.0).round(2) == 0.44


def test_the_losses_are_compared_after_equally_many_updates():
    accuracies = runpy.run_path(str(TOOLS / "draw_losses.py"))["accuracies"]
    means = {arm: by_updates.get(64) for arm, by_updates in accuracies(64).items()}
    measured = {arm: round(mean.value, 2) for arm, mean in means.items() if mean}
    assert measured == {"GRPO": 0.24, "clip-higher": 0.26, "BAPO": 0.36}  # not those after 128 updates
    assert set(accuracies(128)["BAPO"]) == {64}
