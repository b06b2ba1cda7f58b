"""`bapo-trl report`, and the report of a run at its end: `report.png`, and lines for the terminal."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill

from ..errors import InputError, MissingPackageError, OneLineParser
from .figure import drawn_panels, save_png
from .health import examine
from .runs import RESULTS_FILE, Logs, Run, group_runs, read_runs, read_settings
from .times import time_line


def main(argv: Sequence[str] | None = None) -> None:
    """Write the report of the runs that the arguments name, by default the process's, and print its health checks."""
    parser = OneLineParser(
        prog="bapo-trl report",
        description="Plot the metrics that runs logged, several runs in one figure and seeds as bands, and check the "
        "health of each run.",
    )
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="an `output_dir`, a checkpoint folder or a trainer_state.json"
    )
    parser.add_argument(
        "--output", "--output_dir", metavar="FOLDER", default="report", help="folder for report.png (default: report)"
    )
    arguments = parser.parse_args(argv)
    runs = read_runs(arguments.runs)
    try:
        print(write_report(runs, Path(arguments.output) / "report.png"))
    except OSError as error:
        raise InputError(
            f"--output {arguments.output} cannot be written: {error.strerror}. Give another folder."
        ) from error


def save_report(log_history: Sequence[Mapping], path: str | Path) -> str:
    """
    Write the report of a run that is in memory, from its `trainer.state.log_history`, see [`write_report`].

    The image is to lie in the `output_dir` of the run, where its settings are.
    """
    logs = Logs(log_history)
    if not len(logs):
        raise InputError(
            "no update was logged (`logging_steps` and `logging_strategy` say which are): there is nothing to draw"
        )
    folder = Path(path).resolve().parent
    return write_report([Run(folder.name, logs, read_settings(folder), read_settings(folder, RESULTS_FILE))], path)


def report_line(log_history: Sequence[Mapping], path: str | Path) -> str:
    """Do as [`save_report`] does, but return an error in words instead of raising it."""
    try:
        return save_report(log_history, path)
    except Exception as error:  # of matplotlib or the disk: a run that is saved does not fail for its figure
        kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
        return f"Report: not drawn, {kind}{error}"


def write_report(runs: Sequence[Run], path: str | Path) -> str:
    """
    Write the report of runs into a PNG; return lines for the terminal: its path and the health of the runs.

    Runs are drawn one over the other; seeds of one setting are a band. A finding that several runs share stands once.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingPackageError("matplotlib is not installed (pip install 'bapo-trl[plots]')")
    groups = group_runs(runs)
    if not drawn_panels(groups):
        raise InputError("the logs hold no number to draw, such as `reward`: give another run")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    save_png(groups, Path(path))
    titles: dict[str, list[str]] = {}  # of the runs that share a finding, by the finding
    for run in (run for group in groups for run in group.runs):
        time = time_line(run.logs, run.facts)
        for line in (*map(str, examine(run.logs, run.facts, run.results)), *[time] * bool(time)):
            titles.setdefault(line, []).append(run.title())
    findings: dict[str, list[str]] = {}  # by the titles of the runs that share them
    for line, some in titles.items():
        findings.setdefault(", ".join(some), []).append(line)
    lines = [f"Report: {path}"]
    for title, said in findings.items():
        indent = "  " if len(runs) > 1 else ""
        lines += [f"{title}:"] if indent else []
        lines += [
            fill(line, 100, initial_indent=indent, subsequent_indent=f"{indent}    ", break_on_hyphens=False)
            for line in said
        ]
    return "\n".join(lines)
