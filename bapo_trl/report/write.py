"""Writes the report of runs: `report.png`, and what the terminal is told of it."""

import contextlib
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import InputError, MissingPackageError
from .figure import drawn_panels, save_png
from .health import Finding, describe, examine
from .logs import Logs
from .runs import Run, group_runs, read_settings, title_of


def has_matplotlib() -> bool:
    """Return whether there is something to draw with."""
    return importlib.util.find_spec("matplotlib") is not None


def save_report(log_history: Sequence[Mapping], path: str | Path) -> str:
    """
    Write the report of a run that is in memory, from its `trainer.state.log_history`, see [`write_report`].

    Logs of an evaluation are left out; undefined values leave a gap. The image is to lie in the `output_dir` of the
    run, where its settings are.
    """
    logs = Logs(log_history)
    if not len(logs):
        raise InputError(
            "no update was logged (`logging_steps` and `logging_strategy` say which are): there is nothing to draw"
        )
    folder = Path(path).resolve().parent
    return write_report([Run(folder.name, logs, read_settings(folder), folder)], path)


def report_line(log_history: Sequence[Mapping], path: str | Path) -> str:
    """Do as [`save_report`] does, and return what stands in the way instead of raising it."""
    try:
        return save_report(log_history, path)
    except InputError as error:
        return f"Report: not drawn, {error}"
    except Exception as error:  # of matplotlib or the disk: a run that is saved does not fail for its figure
        return f"Report: not drawn, {type(error).__name__}: {error}"


def write_report(runs: Sequence[Run], path: str | Path) -> str:
    """
    Write the report of runs; return lines for the terminal: where it is and what it found.

    Runs are laid over one another; seeds of one setting are a band. The image is a PNG; one that is there is replaced
    when the new one is whole.
    """
    if not has_matplotlib():
        raise MissingPackageError("matplotlib is not installed (pip install 'bapo-trl[plots]')")
    path = Path(path)
    groups = group_runs(runs)
    if not drawn_panels(groups):
        raise InputError(f"RUN {title_of(runs)}: its logs hold no number to draw, such as `reward`. Give another run.")
    path.parent.mkdir(parents=True, exist_ok=True)
    with _replacing(path) as unfinished:
        save_png(groups, unfinished)
    has_titles = len(runs) > 1 or bool(runs[0].facts.method)
    lines = [f"Report: {path}"]
    for title, findings in _health([run for group in groups for run in group.runs]):
        lines += [*([f"{title}:"] if has_titles else []), *(f"  {describe(finding)}" for finding in findings)]
    return "\n".join(lines)


def _health(runs: Sequence[Run]) -> list[tuple[str, list[Finding]]]:
    """
    Return each finding once, under the title of the runs that share it.

    Those that differ in nothing but their numbers are one; there, each sentence is behind the labels of its runs.
    """
    labels_of: dict[Finding, dict[str, list[str]]] = {}  # by finding without its sentence, and by sentence
    for run in runs:
        for finding in examine(run.logs, run.facts):
            sentences = labels_of.setdefault(replace(finding, sentence=""), {})
            sentences.setdefault(finding.sentence, []).append(run.label)
    by_title: dict[str, list[Finding]] = {}
    for finding, sentences in labels_of.items():
        title = title_of(run for run in runs if any(run.label in labels for labels in sentences.values()))
        parts = [f"{', '.join(labels)}: {sentence}" for sentence, labels in sentences.items()]
        sentence = " ".join(parts if len(parts) > 1 else sentences)
        by_title.setdefault(title, []).append(replace(finding, sentence=sentence))
    return list(by_title.items())


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Give a file to write in place of another: it takes its name when it is whole, and is removed if it is not."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
