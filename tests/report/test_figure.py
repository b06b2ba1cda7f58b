"""The picture of runs and what the terminal is told, by the command."""

import re

import pytest

from bapo_trl import cli
from bapo_trl.report.command import main
from bapo_trl.report.figure import ACCURACY, MOST_PANELS, PANELS
from tests.helpers.commands import ends
from tests.report.made_logs import made_logs, save_run


pytestmark = pytest.mark.figures


@pytest.fixture
def report(tmp_path, monkeypatch):
    """Return a function that reports runs, and returns the figure that is drawn of them."""
    from matplotlib.figure import Figure

    drawn, savefig = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *args, **kwargs: (drawn.append(figure), savefig(figure, *args, **kwargs))
    )

    def call(*runs):
        main([*map(str, runs), "--output", str(tmp_path / "out")])
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.png"]
        assert (tmp_path / "out" / "report.png").read_bytes()[:4] == b"\x89PNG"
        return drawn[-1]

    return call


def panels(figure) -> dict:
    return {axes.get_title(loc="left"): axes for axes in figure.axes if axes.get_title(loc="left")}


def legend(axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().texts]


def values(axes, color) -> list[list[float]]:
    return [line.get_ydata().tolist() for line in axes.lines if line.get_color() == color]


def share(run=0):
    return {"facts": {"target": 0.55, "method": "VESPO"}, "seed": 3, "fingerprint": run}


def test_a_run_has_the_panels_it_has_data_for(report, tmp_path, capsys):
    figure = report(save_run(tmp_path / "mine", made_logs(), share()))
    found = panels(figure)
    assert list(found) == [panel.title for panel in PANELS if "transfers" not in panel.title and panel is not ACCURACY]
    assert 6 <= len(found) <= MOST_PANELS
    assert legend(found["Positive contribution (fraction of the loss)"]) == ["as trained", "at start bounds", "target"]
    assert legend(found["Clip bounds (importance ratio)"]) == ["upper bound", "lower bound", "ratio 1: on-policy"]
    assert legend(found["Importance ratios"]) == ["mean", "largest", "smallest", "healthy mean"]
    for axes in found.values():  # no legend covers a line
        assert not axes.get_legend() or axes.get_legend().get_window_extent().y1 <= axes.get_window_extent().y0
    assert "band" not in figure.get_supxlabel()
    assert figure.get_suptitle() == "VESPO: mine"
    printed = capsys.readouterr().out
    assert printed.startswith(f"Report: {tmp_path}/out/report.png\nHealth checks: 3/3 passed. ")


def test_three_seeds_are_a_band_and_a_maximum_is_the_largest(report, tmp_path, capsys):
    ages, ratios = [[7.0, 3.0], [5.0, 6.0], [1.0, 1.0]], [[0.25, 0.5], [0.125, 0.75], [1.0, 1.0]]
    logs = [
        made_logs(2, **{"staleness/mean": [1.5 + seed, 2.0], "staleness/max": ages[seed], "ratio/min": ratios[seed]})
        for seed in range(3)
    ]
    runs = [
        save_run(tmp_path / f"seed{seed}", logs[seed], {"seed": seed, "fingerprint": "alike"}) for seed in range(3)
    ]
    figure = report(*runs)
    assert "band: smallest to largest of the seeds" in figure.get_supxlabel()
    assert figure.get_suptitle() == "seed (3 seeds)"
    found = panels(figure)
    staleness = found["Staleness of samples (policy versions)"]
    (band,) = staleness.collections
    assert {tuple(point) for point in band.get_paths()[0].vertices} >= {(1.0, 1.5), (1.0, 3.5), (2.0, 2.0)}
    assert values(staleness, "C0") == [[2.5, 2.0]]
    assert values(staleness, "C1") == [[7.0, 6.0]]
    assert values(found["Importance ratios"], "C2") == [[0.125, 0.5]]
    assert capsys.readouterr().out.count("Health checks") == 1  # which all share


def rejection(capsys, *arguments) -> str:
    ends(cli.main, ["report", *arguments], code=1)  # as for the other commands
    (error,) = capsys.readouterr().err.splitlines()
    return error


def test_a_mistake_ends_in_one_line(tmp_path, capsys):
    run, out = save_run(tmp_path / "run", [{"loss": None, "step": 1}]), tmp_path / "out"
    error = rejection(capsys, tmp_path / "nowhere", "--output", out)
    assert re.match("bapo-trl report: error: RUN .*nowhere: no such file or folder", error)
    error = rejection(capsys, run, "--output", out)
    assert error.endswith("error: the logs hold no number to draw, such as `reward`: give another run")
    assert not out.exists()
    out.touch()
    run = save_run(tmp_path / "run", made_logs(2))
    assert f"--output {out} cannot be written: File exists. Give" in rejection(capsys, run, "--output", out)
