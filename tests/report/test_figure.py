"""The picture of runs and what the terminal is told, by the command."""

import math
import os
import re
import sys

import pytest

from bapo_trl import cli
from bapo_trl.report.command import main
from bapo_trl.report.figure import COLORS, save_png
from bapo_trl.report.panels import PANELS
from tests.helpers.commands import ends, run_command
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
    """Return the values of the lines in a color that are not single dots or marks."""
    lines = [line for line in axes.lines if line.get_color() == color and line.get_marker() == "None"]
    return [line.get_ydata().tolist() for line in lines]


def share(run=0):
    return {"facts": {"target": 0.55, "method": "VESPO"}, "seed": 3, "fingerprint": run}


def test_a_run_has_the_panels_it_has_data_for(report, tmp_path, capsys):
    figure = report(save_run(tmp_path / "mine", made_logs(), share()))
    found = panels(figure)
    assert list(found) == [panel.title for panel in PANELS]
    assert 6 <= len(found) <= 8
    assert legend(found["Share of positive-advantage tokens in the loss"]) == ["as trained", "unadjusted", "target"]
    assert legend(found["Clip bounds (importance ratio)"]) == ["upper bound", "lower bound"]
    assert legend(found["Importance ratios"]) == ["mean", "largest", "smallest"]
    assert "mean of the seeds" not in figure.get_supxlabel()
    assert figure.get_suptitle() == "VESPO: mine"
    printed = capsys.readouterr().out
    assert printed.startswith(f"Report: {tmp_path}/out/report.png\nVESPO: mine:\n  [healthy]")
    assert "7 of 7 checks made on 20 logs, and none found anything." in printed


def test_runs_with_different_metrics_are_laid_over_one_another(report, tmp_path, capsys):
    first = save_run(tmp_path / "queue", made_logs(), share())
    plain = [{"loss": 0.1, "reward": 0.4, "step": step, "completions/clipped_ratio": 0.8} for step in range(1, 40)]
    figure = report(first, save_run(tmp_path / "plain $x^{$", plain))  # TRL's logs, without settings
    assert [text.get_text() for text in figure.legends[0].texts] == ["VESPO: queue", "plain $x^{$"]
    found = panels(figure)
    assert [values(found["Mean reward of the samples"], color) for color in COLORS[:2]] == [[[0.5] * 20], [[0.4] * 39]]
    assert not any(values(found["Entropy of the policy (nats per token)"], COLORS[1]))
    printed = capsys.readouterr().out
    assert "queue:\n  [healthy]" in printed
    assert "plain $x^{$:\n  [warning] Completions cut off: 80% of the completions ended for their length" in printed


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
    assert "Line: mean of the seeds that have a value at the update; band: from the smallest" in figure.get_supxlabel()
    assert figure.get_suptitle() == f"{tmp_path.name} (3 seeds)"
    found = panels(figure)
    staleness = found["Staleness of the samples (policy versions)"]
    (band,) = staleness.collections
    assert {tuple(point) for point in band.get_paths()[0].vertices} >= {(1.0, 1.5), (1.0, 3.5), (2.0, 2.0)}
    assert values(staleness, COLORS[0]) == [[2.5, 2.0]]
    assert values(staleness, COLORS[1]) == [[7.0, 6.0]]
    assert values(found["Importance ratios"], COLORS[2]) == [[0.125, 0.5]]
    assert capsys.readouterr().out.count("checks made on") == 1  # which all share
    assert "mean of the seeds" not in report(runs[0]).get_supxlabel()


def test_a_maximum_that_equals_the_mean_does_not_hide_it(report, tmp_path):
    ages = [0.0, 1.0, 2.0]
    figure = report(save_run(tmp_path / "mine", made_logs(3, **{"staleness/mean": ages, "staleness/max": ages})))
    mean, largest = (
        line for line in panels(figure)["Staleness of the samples (policy versions)"].lines if len(line.get_ydata())
    )
    assert (mean.get_linestyle(), largest.get_linestyle()) == ("-", "--")


def test_an_update_that_lacks_a_value_leaves_a_gap_and_one_without_a_generation_does_not(report, tmp_path):
    logs = made_logs(6, entropy=[1.0, None, 3.0, math.nan, 4.0, 5.0], reward=[0.125, 0.25, 0.5, 0.75, 0.875, 1.0])
    del logs[3]["entropy"], logs[2]["reward"]
    found = panels(report(save_run(tmp_path / "gaps", logs)))
    entropy = found["Entropy of the policy (nats per token)"]
    assert str(values(entropy, COLORS[0])) == "[[1.0, nan, 3.0, nan, 4.0, 5.0]]"
    assert [line.get_xdata().tolist() for line in entropy.lines if line.get_marker() == "."] == [[1, 3]]  # alone
    assert values(found["Mean reward of the samples"], COLORS[0]) == [[0.125, 0.25, 0.75, 0.875, 1.0]]


def test_a_finding_that_runs_share_is_said_once_by_their_names(report, tmp_path, capsys):
    bapo, vespo = ({"facts": {"method": name}, "fingerprint": name} for name in ("BAPO", "VESPO"))
    long, longer = {"completions/clipped_ratio": 0.8}, {"completions/clipped_ratio": 0.9}
    report(
        save_run(tmp_path / "a", made_logs(**long), {**bapo, "seed": 1}),
        save_run(tmp_path / "b", made_logs(**longer, **{"ratio/ess": 0.1}), {**bapo, "seed": 2}),
        save_run(tmp_path / "c", made_logs(**long), vespo),
    )
    printed = capsys.readouterr().out
    cut = "of the completions ended for their length, in the latest 5 of 20 logs."
    assert f"BAPO: a, b; VESPO: c:\n  [warning] Completions cut off: a, c: 80% {cut} b: 90% {cut} Try:" in printed
    assert "BAPO: b:\n  [warning] Effective sample size: below" in printed
    assert printed.count("A larger `max_completion_length`") == 1


def test_more_runs_than_colors(report, tmp_path, capsys):
    report(*(save_run(tmp_path / f"run{index}", made_logs(2), share(index)) for index in range(9)))
    printed = capsys.readouterr().out
    assert printed.count("checks made on") == 1  # all nine share it
    assert ", ".join(f"run{index}" for index in range(9)) in printed


def refusal(capsys, *arguments) -> str:
    ends(cli.main, ["report", *arguments], code=1)  # as for the other commands
    (error,) = capsys.readouterr().err.splitlines()
    return error


def test_a_mistake_ends_in_one_line(tmp_path, capsys):
    run, out = save_run(tmp_path / "run", [{"loss": None, "step": 1}]), tmp_path / "out"
    error = refusal(capsys, tmp_path / "nowhere", "--output", out)
    assert re.match("bapo-trl report: error: RUN .*nowhere: no such file or folder", error)
    error = refusal(capsys, run, "--output", out)
    assert error.endswith("error: RUN run: its logs hold no number to draw, such as `reward`. Give another run.")
    assert not out.exists()
    out.touch()
    run = save_run(tmp_path / "run", made_logs(2))
    assert f"--output {out} cannot be written: File exists. Give" in refusal(capsys, run, "--output", out)


def test_without_matplotlib_the_command_says_what_to_install(tmp_path, monkeypatch, capsys):
    run = save_run(tmp_path / "run", made_logs())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    error = refusal(capsys, run, "--output", tmp_path / "out")
    assert "matplotlib is not installed (pip install 'bapo-trl[plots]')" in error


def test_the_command_loads_neither_torch_nor_a_window(tmp_path):
    run = save_run(tmp_path / "run", made_logs(2))
    code = (
        "import sys; from bapo_trl.report.command import main; main(sys.argv[1:]); "
        "assert not {'torch', 'transformers', 'matplotlib.pyplot'} & set(sys.modules)"
    )
    result = run_command([sys.executable, "-c", code, str(run), "--output", str(tmp_path / "out")])
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("broken", ["save_png", "os.replace"])
def test_a_write_that_fails_leaves_what_was_there(report, tmp_path, monkeypatch, broken):
    run, out = save_run(tmp_path / "run", made_logs(2)), tmp_path / "out" / "report.png"
    report(run)
    before = out.stat().st_mtime_ns

    def fail(groups, path):
        if broken == "save_png":
            save_png(groups, path)
        raise RuntimeError("full")

    monkeypatch.setattr(f"bapo_trl.report.write.{broken}", fail)
    with pytest.raises(RuntimeError):
        report(run)
    assert os.listdir(out.parent) == ["report.png"]
    assert out.stat().st_mtime_ns == before


@pytest.mark.parametrize("logs", [made_logs(), [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.6, "loss": 1.0}]])
def test_the_caption_of_the_picture_is_within_it(report, tmp_path, logs):
    logs = [{"loss": 0.1, **log} for log in logs]
    figure = report(*(save_run(tmp_path / f"seed{seed}", logs, share() | {"seed": seed}) for seed in (1, 2)))
    figure.draw_without_rendering()
    assert "band" in figure.get_supxlabel()
    caption = figure._supxlabel.get_window_extent()
    assert caption.x0 >= 0
    assert caption.x1 <= figure.bbox.width
