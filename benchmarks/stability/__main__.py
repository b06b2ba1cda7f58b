"""Make the runs of the study that have no rows yet, and write its result."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

import benchmarks.stability
from benchmarks.common import ROOT, earlier_runs, result_path, save_result, write_result
from benchmarks.run_pool import run_all

from .arms import ARMS, MAIN
from .plan import PRESETS, Plan, Preset, Run, choose_learning_rates
from .rows import rows_of


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stability",
        description=benchmarks.stability.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", choices=PRESETS, default="full", help="size of the study")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; 0: write what is finished, make none")
    parser.add_argument("--finished", type=Path, help="file of finished runs (outputs/stability_<preset>.jsonl)")
    arguments = parser.parse_args(argv)
    preset = PRESETS[arguments.preset]
    device = "cpu" if preset.args.get("use_cpu", True) else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("the preset gpu needs a GPU, and torch sees none.")
    finished = arguments.finished or ROOT / "outputs" / f"stability_{arguments.preset}.jsonl"
    is_kept = arguments.preset != "quick"  # its runs are too few to report
    path = result_path("stability", device) if is_kept else finished.with_suffix(".json")
    old = json.loads(path.read_text()) if is_kept and path.exists() else {"results": []}
    if not arguments.jobs and not old["results"] and not finished.exists():
        parser.error(f"--jobs 0 writes finished runs, and there is no {finished}: give another --jobs or --finished.")

    rows, runs_left = make_study(preset, old["results"], finished, arguments.jobs)
    settings = {**asdict(preset), "runs_left": runs_left, "threads": 1}
    if not is_kept:
        write_result({"settings": settings, "results": rows}, path)
    elif len(rows) == len(old["results"]):  # they tell of the machine that made them
        write_result({**old, "settings": settings}, path)
    else:
        save_result("stability", device, settings, rows, earlier_runs(old))


def make_study(preset: Preset, kept: Sequence[dict], finished: Path, jobs: int) -> tuple[list[dict], int]:
    """
    Make the runs of a study that have no rows yet.

    Args:
        preset (`Preset`):
            Size of the study.
        kept (sequence of `dict`):
            Rows of past studies.
        finished (`Path`):
            File of the runs that are made, from which an interrupted study goes on.
        jobs (`int`):
            Runs at a time; with 0, none is made.

    Returns:
        `tuple[list[dict], int]`: The kept rows and then the new ones, and at least how many runs are to come.
    """
    rows = {row["key"]: row for row in kept}

    def make(runs: Sequence[Run]) -> list[dict]:
        return rows_of(runs, preset, rows, lambda specs: run_all(specs, finished, jobs))

    runs_left = 0
    for task in preset.updates:
        print(f"{task}:", flush=True)
        plan = Plan(preset, task, choose_learning_rates(task, list(ARMS) if preset.few_seeds else MAIN, preset, make))
        reported, candidates = list(plan.reported()), list(plan.candidates())
        made = make(reported)
        more = list(plan.more_seeds(made))
        made += make(more) + make(candidates)
        runs_left += len(reported) + len(more) + len(candidates) - len(made)
    return list(rows.values()), runs_left


if __name__ == "__main__":
    main()
