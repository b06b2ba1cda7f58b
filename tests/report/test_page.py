"""The page and the picture of runs, by the command."""

import math
import re
import sys
from html.parser import HTMLParser

import pytest

from bapo_trl import cli
from bapo_trl.report.command import main
from bapo_trl.report.figure import COLORS, panel_svg, save_png
from bapo_trl.report.panels import PANELS
from bapo_trl.report.runs import group_runs, read_runs
from tests.helpers.commands import ends, run_command
from tests.report.made_logs import made_logs, save_run


pytestmark = pytest.mark.figures


QUEUE = {"replay/size": 40.0, "replay/fraction": 0.25, "bapo/negative_weight": [1.0, 0.4]}
POOL = {"partial/in_flight": 6.0, "partial/parked_tokens": 120.0}
OPTIONAL = {
    "Weight of negative-advantage tokens", "Samples in the replay queue", "Share of the batch from the queue",
    "Completions in flight (pool)", "Tokens parked in the pool",
}  # fmt: skip


class Page(HTMLParser):
    """Titles of the panels, the lines of each, and all text; fails on tags that are not closed."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.panels: dict[str, str] = {}
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] == "figcaption":
            self.panels[data] = ""
        elif "svg" in self.open:
            self.panels[list(self.panels)[-1]] += f"{data.strip()}\n" if data.strip() else ""


def report(folder, *runs) -> tuple[Page, str]:
    main([*map(str, runs), "--output", str(folder)])
    assert (folder / "report.png").read_bytes()[:4] == b"\x89PNG"
    assert sorted(path.name for path in folder.iterdir()) == ["report.html", "report.png"]
    html = (folder / "report.html").read_text()
    assert "http://" not in re.sub(r'xmlns(:xlink)?="[^"]+"', "", html)
    assert "https://" not in html
    return Page(html), html


def test_a_run_has_the_panels_it_has_data_for(tmp_path, capsys):
    run = save_run(tmp_path / "mine", made_logs(), {"positive_contribution_target": 0.55, "seed": 3})
    page, _ = report(tmp_path / "out", run)
    assert list(page.panels) == [panel.title for panel in PANELS if panel.title not in OPTIONAL]
    share = page.panels["Share of positive-advantage tokens in the loss"]
    assert share.endswith("as trained\nunadjusted\ntarget\n")
    assert "upper bound\nlower bound\n" in page.panels["Clip bounds (importance ratio)"]
    assert "mean\nlargest\nsmallest\n" in page.panels["Importance ratios"]
    assert "7 of 7 checks made on 20 logs, and none found anything." in page.text
    assert "mean of the seeds" not in page.text
    printed = capsys.readouterr().out
    assert printed.startswith(f"Report: {tmp_path}/out/report.png\nReport: {tmp_path}/out/report.html\n  [healthy]")


def test_runs_with_different_metrics_are_laid_over_one_another(tmp_path, capsys):
    first = save_run(tmp_path / "queue", made_logs(**QUEUE), {"positive_contribution_target": 0.5, "seed": 1})
    plain = [{"loss": 0.1, "reward": 0.4, "step": step, "completions/clipped_ratio": 0.8} for step in range(1, 40)]
    second = save_run(tmp_path / "plain", plain)
    page, html = report(tmp_path / "out", first, second)
    pool = {"Completions in flight (pool)", "Tokens parked in the pool"}
    assert list(page.panels) == [panel.title for panel in PANELS if panel.title not in pool]
    for color in ("#3b82f6", "#e4572e"):  # both runs, in the legend and in the panel that both have
        assert f"background:{color}" in html
        assert f"stroke: {color}" in html[html.index("Mean reward") : html.index("Length of the completions")]
    assert "#e4572e" not in html[html.index("<figcaption>Norm of the gradient") : html.index("<figcaption>Share of")]
    assert "80% of the completions ended for their length" in page.text
    assert "7 of 7 checks made" in page.text
    printed = capsys.readouterr().out
    assert "queue:\n  [healthy]" in printed
    assert "plain:\n  [warning] Completions cut off" in printed


def test_three_seeds_are_a_band(tmp_path):
    runs = [
        save_run(tmp_path / f"seed{seed}", made_logs(20 - seed, reward=seed / 10, **POOL), {"seed": seed})
        for seed in (1, 2, 3)
    ]
    page, html = report(tmp_path / "out", *runs)
    assert "Line: mean of the seeds that have a value at the update; band: from the smallest" in page.text
    assert f"Training report: {tmp_path.name} (3 seeds)" in page.text
    assert "1, 2, 3" in page.text  # their seeds, in one column
    assert "FillBetweenPolyCollection" in html
    assert "fill-opacity: 0.2" in html[html.index("Mean reward") : html.index("Length of the completions")]
    assert "Completions in flight (pool)" in page.panels
    assert page.text.count("checks made on") == 3
    alone, html = report(tmp_path / "one", runs[0])
    assert "fill-opacity: 0.2" not in html
    assert "mean of the seeds" not in alone.text


def drawn_lines(monkeypatch, title: str, *runs) -> list[list[float]]:
    """Draw the panel of this title of saved runs; return the values of each of its lines, and of single dots."""
    from matplotlib.axes import Axes

    drawn, plot = [], Axes.plot

    def note(axes, steps, values, **kwargs):
        drawn.append([float(value) for value in values])
        return plot(axes, steps, values, **kwargs)

    monkeypatch.setattr(Axes, "plot", note)
    (panel,) = (panel for panel in PANELS if panel.title.startswith(title))
    panel_svg(panel, group_runs(read_runs(runs)))
    return [values for values in drawn if values]


def test_a_maximum_that_equals_the_mean_does_not_hide_it(tmp_path):
    ages = [0.0, 1.0, 2.0]
    run = save_run(tmp_path / "mine", made_logs(3, **{"staleness/mean": ages, "staleness/max": ages}))
    (panel,) = (panel for panel in PANELS if panel.title.startswith("Staleness"))
    svg = panel_svg(panel, group_runs(read_runs([run])))
    of_color = {color: [path for path in svg.split("<path") if f"stroke: {color}" in path] for color in COLORS[:2]}
    mean, largest = of_color.values()
    assert mean
    assert not any("stroke-dasharray" in path for path in mean)
    assert largest
    assert all("stroke-dasharray" in path for path in largest)


def test_over_seeds_a_maximum_is_the_largest_and_a_minimum_the_smallest(tmp_path, monkeypatch):
    ages, ratios = [[7.0, 3.0], [5.0, 6.0]], [[0.25, 0.5], [0.125, 0.75]]
    runs = [
        save_run(
            tmp_path / f"seed{seed}",
            made_logs(
                2, **{"staleness/mean": [1.5 + seed, 2.0], "staleness/max": ages[seed], "ratio/min": ratios[seed]}
            ),
            {"seed": seed},
        )
        for seed in (0, 1)
    ]
    assert drawn_lines(monkeypatch, "Staleness", *runs) == [[2.0, 2.0], [7.0, 6.0]]
    assert [0.125, 0.5] in drawn_lines(monkeypatch, "Importance", *runs)


def test_an_update_that_lacks_a_value_leaves_a_gap_and_one_without_a_generation_does_not(tmp_path, monkeypatch):
    logs = made_logs(5, entropy=[1.0, 2.0, 3.0, 4.0, 5.0], reward=[0.125, 0.25, 0.5, 0.75, 0.875])
    del logs[2]["entropy"], logs[2]["reward"]
    run = save_run(tmp_path / "gaps", logs)
    assert str(drawn_lines(monkeypatch, "Entropy", run)) == "[[1.0, 2.0, nan, 4.0, 5.0]]"
    assert drawn_lines(monkeypatch, "Mean reward", run) == [[0.125, 0.25, 0.75, 0.875]]


def test_undefined_values_leave_gaps(tmp_path):
    some = [1.0, None, 0.9, math.nan, 0.8, 0.7]  # the first and the third value stand alone
    run = save_run(tmp_path / "gaps", made_logs(grad_norm=some, **{"ratio/min": 0.0, "bapo/clip_low": None}))
    page, html = report(tmp_path / "out", run)
    norm = html[html.index("<figcaption>Norm of the gradient") : html.index("<figcaption>Share of positive")]
    assert "lower bound" not in page.panels["Clip bounds (importance ratio)"]
    assert "nan" not in norm.lower().replace("dominant", "")


def test_what_users_wrote_is_escaped_and_the_table_has_the_settings_that_differ_and_the_main_ones(tmp_path):
    name, common = "a<b>&'\"`c` $x^{$", {"seed": 1, "weight_decay": 0.25, "beta": 0.125}
    settings = {"reward_funcs": ["<script>alert(1)</script>"], "adam_beta2": 0.875}
    run = save_run(tmp_path / name, made_logs(2), {**common, **settings})
    other = save_run(tmp_path / "other", made_logs(2), {**common, "reward_funcs": ["x"], "adam_beta2": 0.75})
    page, html = report(tmp_path / "out", run, other)
    assert "<script>" not in html
    assert '["<script>alert(1)</script>"]' in page.text
    assert name in page.text
    assert "adam_beta2" in page.text
    assert "weight_decay" not in page.text
    assert html.count("<td>0.125</td>") == 2
    assert "7 of 7 checks made on 2 logs," in page.text


def test_more_runs_than_colors(tmp_path):
    runs = [save_run(tmp_path / f"run{index}", made_logs(2), {"seed": 1, "beta": index}) for index in range(9)]
    page, _ = report(tmp_path / "out", *runs)
    assert page.text.count("checks made on") == 1  # all nine share it
    assert ", ".join(run.name for run in runs) in page.text


def test_a_mistake_ends_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ends(cli.main, ["report", "nowhere"], code=1)
    (error,) = capsys.readouterr().err.splitlines()
    assert re.match("bapo-trl report: error: RUN .*nowhere: no such file or folder", error)
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_command_says_what_to_install(tmp_path, monkeypatch, capsys):
    run = save_run(tmp_path / "run", made_logs())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ends(cli.main, ["report", run, "--output", tmp_path / "out"], code=1)
    assert "matplotlib is not installed (pip install 'bapo-trl[plots]')" in capsys.readouterr().err


def test_the_command_loads_neither_torch_nor_a_window(tmp_path):
    run = save_run(tmp_path / "run", made_logs(2))
    code = (
        "import sys; from bapo_trl.report.command import main; main(sys.argv[1:]); "
        "assert not {'torch', 'transformers', 'matplotlib.pyplot'} & set(sys.modules)"
    )
    result = run_command([sys.executable, "-c", code, str(run), "--output", str(tmp_path / "out")])
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("logs", [made_logs(), [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.6}]])
def test_the_caption_of_the_picture_is_within_it(tmp_path, monkeypatch, logs):
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *args, **kwargs: figures.append(figure))
    runs = [save_run(tmp_path / f"seed{seed}", logs, {"seed": seed}) for seed in (1, 2)]
    save_png(group_runs(read_runs(runs)), tmp_path / "report.png")
    (figure,) = figures
    figure.draw_without_rendering()
    assert "band" in figure.get_supxlabel()
    caption = figure._supxlabel.get_window_extent()
    assert caption.x0 >= 0
    assert caption.x1 <= figure.bbox.width
