"""Files as users have them: damaged, with odd names, with nothing to draw, or too long to draw whole."""

import codecs
import json
import os

import numpy as np
import pytest

from bapo_trl import cli
from bapo_trl.report.command import main
from bapo_trl.report.figure import save_png
from bapo_trl.report.logs import MOST_POINTS, Points, curve_of, thinned
from bapo_trl.report.runs import read_runs
from tests.helpers.commands import ends
from tests.report.made_logs import made_logs, save_run


def refusal(capsys, *arguments) -> str:
    ends(cli.main, ["report", *arguments], code=1)  # as for the other commands
    (error,) = capsys.readouterr().err.splitlines()
    return error


@pytest.mark.figures
def test_a_run_that_logged_its_loss_alone_is_drawn(tmp_path, capsys):
    logs = [{"loss": 0.1 * step, "step": step} for step in (1, 2, 3)]
    main([str(save_run(tmp_path / "run", logs)), "--output", str(tmp_path / "out")])
    assert "<figcaption>Loss</figcaption>" in (tmp_path / "out" / "report.html").read_text()
    assert (tmp_path / "out" / "report.png").read_bytes()[:4] == b"\x89PNG"
    assert "[note] Not checked" in capsys.readouterr().out


def test_a_run_without_a_number_is_refused(tmp_path, capsys):
    run = save_run(tmp_path / "run", [{"loss": None, "step": 1}])
    error = refusal(capsys, run, "--output", tmp_path / "out")
    assert error.endswith("error: RUN run: its logs hold no number to draw, such as `reward`. Give another run.")
    assert not (tmp_path / "out").exists()


@pytest.mark.figures
def test_names_that_are_no_utf_8(tmp_path, capsys):
    runs = [save_run(tmp_path / os.fsdecode(name), made_logs(2)) for name in (b"\xff run", b"\xfe run")]
    out = tmp_path / os.fsdecode(b"out \xff")
    main([*map(str, runs), "--output", str(out)])
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "Training report: \\udcff run, \\udcfe run" in page
    assert "out \\udcff/report.png" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("mark", "encoding"), [(codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (b"", "utf-8")]
)
def test_a_byte_order_mark_is_no_damage(tmp_path, mark, encoding):
    run = save_run(tmp_path / "run", made_logs(3), {"model": "ä"})
    (run / "logs.jsonl").write_text("".join(json.dumps(log) + "\n" for log in made_logs(3)))
    for file in run.iterdir():
        file.write_bytes(mark + file.read_text().encode(encoding))
    for path in (run, run / "logs.jsonl"):
        (read,) = read_runs([path])
        assert (read.logs.steps.tolist(), read.settings) == ([1, 2, 3], {"model": "ä"})


STATE = json.dumps({"global_step": 3, "log_history": made_logs(3), "zeros": [0] * 3}, indent=2)
LINES = "".join(json.dumps(log) + "\n" for log in made_logs(3))


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("logs.jsonl", LINES.replace('"step": 2', '"step" 2'), "line 2: Expecting ':' delimiter. Mend or remove it."),
        ("logs.jsonl", LINES + "\n\n{broken}\n", "line 6: Expecting property name"),
        ("logs.jsonl", LINES + '{"loss": 1\n' + LINES, "line 4: Expecting ',' delimiter"),
        ("logs.jsonl", LINES + "[1]\n", "(line 4 is none)."),
        ("logs.jsonl", LINES + "[" * 100_000 + "\n", "line 4: maximum recursion depth"),
        ("logs.jsonl", LINES + "9" * 5000 + "\n", "line 4: Exceeds the limit"),
        ("trainer_state.json", STATE.replace('"step": 2', '"step" 2'), "line {}: Expecting ':' delimiter"),
        ("trainer_state.json", STATE.replace("0\n  ]", "0,\n  ]"), "line {}: {}"),  # in Python's words
        ("trainer_state.json", STATE + "\n}", "line {}: Extra data. Give another checkpoint of the run."),
        ("trainer_state.json", "", "line 1: Expecting value"),
        ("trainer_state.json", "[" * 100_000, "is damaged: maximum recursion depth"),
        ("trainer_state.json", STATE.replace('"log_history": [', '"log_history": [\n3,'), "(log 1 is none)."),
    ],
)
def test_the_place_of_a_damage_is_named(tmp_path, capsys, file, text, said):
    (tmp_path / file).write_text(text)
    if "{}" in said:  # as json has it
        with pytest.raises(json.JSONDecodeError) as whole:
            json.loads(text)
        said = said.format(whole.value.lineno, whole.value.msg)
    error = refusal(capsys, tmp_path / file, "--output", tmp_path / "out")
    assert f"{tmp_path / file} " in error
    assert said in error


@pytest.mark.figures
@pytest.mark.parametrize("broken", ["save_png", "render_page", "os.replace"])
def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch, broken):
    run, out = save_run(tmp_path / "run", made_logs(2)), tmp_path / "out"
    main([str(run), "--output", str(out)])
    before = {file.name: file.stat().st_mtime_ns for file in out.iterdir()}

    def fail(groups, path, *more):
        if broken == "save_png":
            save_png(groups, path)
        raise RuntimeError("full")

    monkeypatch.setattr(f"bapo_trl.report.write.{broken}", fail)
    with pytest.raises(RuntimeError):
        main([str(run), "--output", str(out)])
    left = {file.name: file.stat().st_mtime_ns for file in out.iterdir()}
    assert left.keys() == before.keys()
    assert left["report.html"] == before["report.html"]


def test_an_output_that_is_a_file_is_refused(tmp_path, capsys):
    run, out = save_run(tmp_path / "run", made_logs(2)), tmp_path / "out"
    out.touch()
    assert f"--output {out} cannot be written: File exists. Give" in refusal(capsys, run, "--output", out)


@pytest.mark.figures
def test_a_long_run_is_thinned_before_it_is_drawn(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    size = 5 * MOST_POINTS
    rewards = np.sin(np.arange(size) / 100)
    rewards[[777, 10_000]] = -3.0, 4.0
    logs = made_logs(size, reward=rewards.tolist())
    drawn, plot = [], Axes.plot

    def watch(axes, steps, values, **style):
        drawn.append((steps, values))
        return plot(axes, steps, values, **style)

    monkeypatch.setattr(Axes, "plot", watch)
    main([str(save_run(tmp_path / "run", logs)), "--output", str(tmp_path / "out")])
    assert max(len(steps) for steps, _ in drawn) <= MOST_POINTS
    steps, values = drawn[0]
    assert (steps[0], steps[-1], values[0], values[-1]) == (1, size, rewards[0], rewards[-1])
    assert dict(zip(steps, values, strict=True)).items() >= {778: -3.0, 10_001: 4.0}.items()


def test_thinning_keeps_ends_extremes_and_long_gaps():
    draw = np.random.default_rng(0)
    size = 50_000
    steps = np.arange(size) * 3
    columns = [Points(steps, draw.normal(size=size)), Points(steps, draw.normal(size=size))]
    for _, values in columns:
        values[10_000:11_000] = np.nan
        values[20_001] = np.nan  # too short to be seen
    whole = curve_of(columns)
    assert np.array_equal(whole.mean, (columns[0].values + columns[1].values) / 2, equal_nan=True)
    curve = thinned(whole)
    assert len(curve.steps) <= MOST_POINTS
    assert (np.diff(curve.steps) > 0).all()
    assert (curve.steps[0], curve.steps[-1]) == (steps[0], steps[-1])
    for name, extreme in (("mean", np.nanmin), ("mean", np.nanmax), ("low", np.nanmin), ("high", np.nanmax)):
        for part in np.array_split(np.arange(size), 400):  # what a pixel shows
            of_whole = getattr(whole, name)[part]
            of_drawn = getattr(curve, name)[np.isin(curve.steps, steps[part])]
            if np.isfinite(of_whole).any():
                assert extreme(of_whole) == extreme(of_drawn)
    assert np.isnan(curve.mean[(curve.steps >= 30_300) & (curve.steps < 32_700)]).all()
    assert thinned(curve) is curve
