"""Command line of `bapo-trl compare STUDY.yaml --output_dir FOLDER`."""

import argparse
import importlib.util
import statistics
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from ..errors import InputError, MissingPackageError, OneLineParser
from .execution import environments, make_runs
from .results import FOLDER, Row, read_rows, with_target, write_row
from .study import Run, read_study


_DESCRIPTION = """
Train with several methods on one task, over several seeds. Report which method reaches the highest accuracy, and
whether the differences are statistically significant.

    bapo-trl compare my_study.yaml --output_dir study --jobs 2

The YAML file holds the settings that all runs share (`base`), the methods (`arms`), the seeds, and how often to
measure the accuracy; docs/compare.md has an example. Each run is a process of `bapo-trl train`. If you stop a study,
the same command resumes it. Once all runs are finished, the command only prints the tables.
"""


def main(arguments: Sequence[str]) -> int | None:
    """
    Run all runs of a study that are not finished, and print the results. Raise an `InputError` for an invalid study.

    Return the exit status: 1 if a run failed or was killed.
    """
    parser = OneLineParser(
        prog="bapo-trl compare", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", metavar="STUDY", help="YAML file that describes the study")
    parser.add_argument("--output_dir", required=True, type=Path, help="folder for the results, one JSON file per run")
    parser.add_argument("--jobs", type=int, default=1, help="number of runs at the same time (default: 1)")
    parser.add_argument("--only", nargs="+", metavar="ARM", help="methods to run (default: all)")
    parser.add_argument("--against", metavar="ARM", help="method to compare the others with (default: the first)")
    parser.add_argument(
        "--axis", choices=("updates", "seconds", "tokens"), default="updates", help="x-axis of the figure"
    )
    parser.add_argument(
        "--dry_run", action="store_true", help="list the runs and the problems that would stop them, and run nothing"
    )
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        raise InputError(f"`--jobs` is {options.jobs}: set it to at least 1.")
    if importlib.util.find_spec("scipy") is None:
        raise MissingPackageError("`compare` needs scipy: pip install 'bapo-trl[compare]'.")
    study = read_study(options.study)
    baseline = options.against or next(iter(study.arms))
    for arm in [*(options.only or ()), baseline]:
        if arm not in study.arms:
            raise InputError(f"'{arm}' is not in `arms` of {options.study}: choose one of {', '.join(study.arms)}.")
    runs = study.runs()
    chosen = [run for run in runs if run.arm in (options.only or study.arms)]
    finished = read_rows(options.output_dir)
    missing = [run for run in chosen if run.key not in finished]
    if options.dry_run:
        print(_plan(chosen, finished, options.jobs), flush=True)
        if missing:
            study.check(on_gpus=True)  # flag errors come first: the study may be for another machine
    if missing:
        study.check()
        environments(study, options.jobs)
    if options.dry_run:
        return None
    if missing:
        options.output_dir.mkdir(parents=True, exist_ok=True)
        print(f"{len(missing)} of {len(runs)} runs to do, {options.jobs} at the same time", flush=True)
        make_runs(study, missing, options.output_dir, options.jobs)
        finished = read_rows(options.output_dir)
    axis = study.measure.get("clock", "wall") if options.axis == "seconds" else options.axis
    rows = []
    for run in (run for run in runs if run.key in finished):
        row = with_target(finished[run.key], run)
        if row != finished[run.key]:  # the study has another target now
            write_row(row, options.output_dir / FOLDER / f"{run.key}.json")
        rows.append(row)
    if rows:
        _show(rows, list(study.arms), baseline, options.output_dir, len(runs), axis)
    return 1 if any(run.key not in finished or finished[run.key].error is not None for run in chosen) else None


def _show(rows: list[Row], arms: list[str], baseline: str, folder: Path, number: int, axis: str) -> None:
    """Print the tables, and save the tables and the figure in the study's folder."""
    from .tables import as_markdown, compare  # needs scipy

    comparisons = compare(rows, arms, baseline)
    text = as_markdown(comparisons)
    if len(rows) < number:
        text = f"{len(rows)} of {number} runs are finished.\n\n{text}"
    print(f"\n{text}")
    (folder / "comparison.md").write_text(f"{text}\n", encoding="utf-8")
    if importlib.util.find_spec("matplotlib") is not None:
        from .figure import save_figure

        save_figure(comparisons, folder / "comparison.png", axis)
        print(f"\nFigure: {folder / 'comparison.png'}")


def _plan(runs: Sequence[Run], finished: dict[str, Row], jobs: int) -> str:
    lines = [f"{'done' if run.key in finished else 'to do':<5}  {run.label}" for run in runs]
    left = sum(run.key not in finished for run in runs)
    lines.append(f"{len(runs)} runs, {left} to do, {jobs} at the same time")
    rows = [finished[run.key] for run in runs if run.key in finished]
    seconds = [row.seconds for row in rows if row.error is None]
    if left and seconds:
        lines[-1] += f": about {timedelta(seconds=round(left * statistics.mean(seconds) / jobs))} at the current pace"
    return "\n".join(lines)
