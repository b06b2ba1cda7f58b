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


def test_three_seeds_have_a_band_where_it_is_narrower_than_an_accuracy(draw):
    rows = [
        Row("A", {}, seed, final=0.5, curve=[(0, 0.1 + seed / 100), (8, 0.5 + seed / 10), (16, [0, 0.5, 1][seed])])
        for seed in (0, 1, 2)
    ]
    (band,) = draw(rows, ["A"]).axes[0].collections
    corners = {tuple(round(float(x), 3) for x in point) for point in band.get_paths()[0].vertices}
    # t(2) 4.3027 * 0.01 / sqrt(3) = 0.025, * 0.1 / sqrt(3) = 0.248; at 16: * 0.5 / sqrt(3) = 1.242, a width above 1
    assert {(0, 0.085), (0, 0.135), (8, 0.352), (8, 0.848)} == corners


def test_a_method_has_the_same_color_in_each_panel_of_an_unfinished_study(draw):
    rows = [
        Row(arm, {"steps": steps}, 0, final=0.5, curve=[(0, 0.1), (8, 0.3)])
        for steps, arm in ((4, "BAPO"), (4, "VESPO"), (16, "GRPO"), (16, "BAPO"))
    ]
    figure = draw(rows, ["GRPO", "BAPO", "VESPO"])
    colors = [(line.get_label(), line.get_color()) for panel in figure.axes for line in panel.lines]
    assert len(colors) == 4
    assert len(dict(colors)) == len(set(colors)) == len({color for _, color in colors}) == 3
    texts, handles = figure.legends[0].texts, figure.legends[0].get_lines()
    assert {text.get_text(): line.get_color() for text, line in zip(texts, handles, strict=True)} == dict(colors)
