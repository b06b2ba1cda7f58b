"""The figure of a study."""

import pytest

from bapo_trl.compare.figure import save_figure
from bapo_trl.compare.results import Row
from bapo_trl.compare.tables import compare


pytestmark = pytest.mark.figures


@pytest.fixture
def draw(tmp_path, monkeypatch):
    """Return a function that draws rows and returns the figure."""
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path, **kwargs: drawn.append(figure))

    def call(rows, arms):
        save_figure(compare(rows, arms, arms[0]), tmp_path / "x.png")
        return drawn[-1]

    return call


def test_each_setting_has_a_panel_with_a_line_and_a_band_for_each_method(draw):
    rows = [
        Row(arm, {"steps": steps}, seed, final=0.5, curve=[(0, 0.1), (8, 0.3 + seed / 10), (16, 0.5)])
        for steps in (4, 16, 64, 256)
        for arm in ("GRPO", "BAPO")
        for seed in (0, 1)
    ]
    figure = draw(rows, ["GRPO", "BAPO"])
    panels = [panel for panel in figure.axes if panel.has_data()]
    assert [panel.get_title() for panel in panels] == ["steps 4", "steps 16", "steps 64", "steps 256"]
    for panel in panels:
        assert [line.get_label() for line in panel.lines] == ["GRPO", "BAPO"]
        assert list(panel.lines[0].get_ydata()) == pytest.approx([0.1, 0.35, 0.5])
        assert len(panel.collections) == 2
        # Two seeds have no band: each has its own line
        seeds = [line.tolist() for line in panel.collections[0].get_segments()]
        assert seeds == [[[0, 0.1], [8, 0.3 + seed / 10], [16, 0.5]] for seed in (0, 1)]
    assert [text.get_text() for text in figure.legends[0].texts] == ["GRPO", "BAPO"]
