"""Writes the report of runs: `report.png` and `report.html`, and what the terminal is told of it."""

import contextlib
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..errors import InputError
from .figure import drawn_panels, panel_svg, save_png
from .health import Finding, describe, examine, shared
from .page import render_page
from .runs import Run, group_runs, read_settings, readable, title_of, update_logs


NO_MATPLOTLIB = "matplotlib is not installed (pip install 'bapo-trl[plots]')"


def has_matplotlib() -> bool:
    """Return whether there is something to draw with."""
    return importlib.util.find_spec("matplotlib") is not None


def write_report(runs: Sequence[Run], path: str | Path) -> dict[str, list[Finding]]:
    """
    Write the report of runs. A file is replaced when the new one is whole.

    Args:
        runs (sequence of [`~runs.Run`]): Runs, laid over one another; seeds of one setting as a band.
        path (`str` or `Path`): Image file to write (PNG). The page is beside it, with the suffix `.html`.

    Returns:
        `dict`: Health lines by the label of their run.

    Raises:
        ImportError: If matplotlib is not installed (extra `plots`).
        InputError: If there is nothing to draw.
    """
    path = Path(path)
    groups = group_runs(runs)
    panels = drawn_panels(groups)
    if not panels:
        raise InputError(f"RUN {title_of(runs)}: its logs hold no number to draw, such as `reward`. Give another run.")
    path.parent.mkdir(parents=True, exist_ok=True)
    findings = {run.label: examine(run.logs, run.method) for group in groups for run in group.runs}
    with _replacing(path) as unfinished:
        save_png(groups, unfinished)
    page = render_page(groups, findings, {panel: panel_svg(panel, groups) for panel in panels})
    with _replacing(path.with_suffix(".html")) as unfinished:
        unfinished.write_text(readable(page), encoding="utf-8")
    return findings


def save_report(log_history: Sequence[Mapping], path: str | Path) -> dict[str, list[Finding]]:
    """
    Write the report of a run that is in memory, see [`write_report`].

    Args:
        log_history (sequence of mappings): Logs of the run, as in `trainer.state.log_history`. Those of an evaluation
            are left out; undefined values leave a gap.
        path (`str` or `Path`): Image file to write, in the `output_dir` of the run, where its settings are.

    Raises:
        ImportError: If matplotlib is not installed (extra `plots`).
        InputError: If no log is that of an update.
    """
    return write_report([_run(log_history, path)], path)


def report_line(log_history: Sequence[Mapping], path: str | Path) -> str:
    """Write the report if there is something to draw, and something to draw it with; return lines that say so."""
    if not has_matplotlib():
        return f"Report: not drawn, {NO_MATPLOTLIB}"
    if not len(update_logs(log_history)):
        return "Report: not drawn, no update was logged (`logging_steps` and `logging_strategy` say which are)"
    return report_lines([_run(log_history, path)], path)


def report_lines(runs: Sequence[Run], path: str | Path) -> str:
    """Write the report of runs, see [`write_report`]; return lines that say where it is and what it found."""
    findings = write_report(runs, path)
    files = [f"Report: {readable(str(file))}" for file in (path, Path(path).with_suffix(".html"))]
    return "\n".join([*files, *health_lines(runs, findings)])


def health_lines(runs: Sequence[Run], findings: Mapping[str, Sequence[Finding]]) -> list[str]:
    """Return the health lines of runs as text, each once, under the title of the runs that share it."""
    of_label = {run.label: run for run in runs}
    lines = []
    for labels, some in shared(findings).items():
        sharing = [of_label[label] for label in labels]
        lines += [f"{title_of(sharing)}:"] if len(runs) > 1 or runs[0].method.name else []
        lines += [f"  {describe(finding)}" for finding in some]
    return lines


def _run(log_history: Sequence[Mapping], path: str | Path) -> Run:
    logs = update_logs(log_history)
    if not len(logs):
        raise InputError("`log_history` has no log of an update: nothing to draw.")
    folder = Path(path).resolve().parent
    return Run(readable(folder.name), logs, read_settings(folder), folder)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Give a file to write in place of another: it takes its name when it is whole, and is removed if it is not."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
