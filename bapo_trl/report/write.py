"""Writes the report of runs: `report.png` and `report.html`, and what the terminal is told of it."""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import InputError
from .figure import drawn_panels, panel_svg, save_png
from .health import Finding, describe, examine
from .page import render_page
from .runs import Run, group_runs, read_settings, update_logs


NO_MATPLOTLIB = "matplotlib is not installed (pip install 'bapo-trl[plots]')"


def has_matplotlib() -> bool:
    """Return whether there is something to draw with."""
    return importlib.util.find_spec("matplotlib") is not None


def write_report(runs: Sequence[Run], path: str | Path) -> dict[str, list[Finding]]:
    """
    Write the report of runs. A file is replaced when the new one is whole.

    Args:
        runs (sequence of [`~runs.Run`]):
            Runs, laid over one another; seeds of one setting as a band.
        path (`str` or `Path`):
            Image file to write (PNG). The page is beside it, with the suffix `.html`.

    Returns:
        `dict`: Health lines by the label of their run.

    Raises:
        ImportError: If matplotlib is not installed (extra `plots`).
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    groups = group_runs(runs)
    findings = {run.label: examine(run.logs) for group in groups for run in group.runs}
    save_png(groups, path)
    page = render_page(groups, findings, {panel: panel_svg(panel, groups) for panel in drawn_panels(groups)})
    unfinished = path.with_name(f".{path.stem}.html.{os.getpid()}")
    unfinished.write_text(page, encoding="utf-8")
    os.replace(unfinished, path.with_suffix(".html"))
    return findings


def save_report(log_history: Sequence[Mapping], path: str | Path) -> dict[str, list[Finding]]:
    """
    Write the report of a run that is in memory, see [`write_report`].

    Args:
        log_history (sequence of mappings):
            Logs of the run, as in `trainer.state.log_history`. Those of an evaluation are left out; undefined values
            leave a gap.
        path (`str` or `Path`):
            Image file to write, in the `output_dir` of the run, where its settings are.

    Raises:
        ImportError: If matplotlib is not installed (extra `plots`).
        ValueError: If no log is that of an update.
    """
    logs = update_logs(log_history)
    if not logs:
        raise InputError("`log_history` has no log of an update: nothing to draw.")
    folder = Path(path).resolve().parent
    return write_report([Run(folder.name, logs, read_settings(folder), folder)], path)


def report_line(log_history: Sequence[Mapping], path: str | Path) -> str:
    """Write the report if there is something to draw, and something to draw it with; return lines that say so."""
    if not has_matplotlib():
        return f"Report: not drawn, {NO_MATPLOTLIB}"
    if not update_logs(log_history):
        return "Report: not drawn, no update was logged (`logging_steps` and `logging_strategy` say which are)"
    findings = save_report(log_history, path)
    return "\n".join([f"Report: {path}", f"Report: {Path(path).with_suffix('.html')}", *health_lines(findings)])


def health_lines(findings: Mapping[str, Sequence[Finding]]) -> list[str]:
    """Return the health lines of runs as text, under the label of the run where there are several."""
    lines = []
    for label, some in findings.items():
        lines += [f"{label}:"] if len(findings) > 1 else []
        lines += [f"  {describe(finding)}" for finding in some]
    return lines
