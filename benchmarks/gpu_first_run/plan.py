"""The parts, and their cases: run in processes within the time limit, with results in a file."""

import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import psutil

from benchmarks.gpu_first_run.layouts import layout
from benchmarks.gpu_first_run.qlora import qlora
from benchmarks.gpu_first_run.sharded import sharded
from benchmarks.gpu_first_run.to_accuracy import time_to_accuracy
from benchmarks.gpu_first_run.trainers import Case, Setup, first_gpu


PARTS: dict[str, Callable[[Setup], dict[str, Case]]] = {
    "time": time_to_accuracy, "layout": layout, "sharded": sharded, "qlora": qlora,
}  # fmt: skip
OWN_PROCESS = ("sharded", "qlora")  # a process for each case; the cases of the others share one
CASE_RAISED = 3  # exit code of a process whose last case raised: the others get another one
UNFINISHED = "did not end"


class Planned(NamedTuple):
    """A case of the plan."""

    part: str
    name: str
    case: Case


def make_plan(parts: Sequence[str], setup: Setup) -> list[Planned]:
    """Return the cases that can run on this machine, part by part in the order of `PARTS`."""
    cases = [Planned(part, name, case) for part in PARTS if part in parts for name, case in PARTS[part](setup).items()]
    return [each for each in cases if each.case.lacks is None]


def run_plan(plan: Sequence[Planned], setup: Setup, path: Path, deadline: float) -> None:
    """Run the cases without a result in the file, until all are done or the next would end after the deadline."""
    while batch := next_batch(plan, path, deadline):
        exit_code = _run(batch, setup, path, deadline)
        why = "cut at the time limit" if exit_code is None else f"the process ended, exit code {exit_code}"
        rows = [rows_of(path, case.part).get(case.name) for case in batch]
        has_begun = any(row is not None for row in rows)
        for case, row in zip(batch, rows, strict=True):
            if row == {"error": UNFINISHED} or (not has_begun and exit_code not in (0, None)):
                write_row(path, case.part, case.name, {"error": why})


def next_batch(plan: Sequence[Planned], path: Path, deadline: float) -> list[Planned]:
    """Return the next cases that run in one process and fit into the remaining time."""
    left = [
        case
        for case in plan
        if case.name not in rows_of(path, case.part)
        and time.monotonic() + time_of_alike(rows_of(path, case.part)) < deadline
    ]
    if left and left[0].part in OWN_PROCESS:
        return left[:1]
    return list(takewhile(lambda case: case.part not in OWN_PROCESS, left))


def _run(batch: Sequence[Planned], setup: Setup, path: Path, deadline: float) -> int | None:
    """Run a process for a batch, and return its exit code; `None` if it was cut at the deadline."""
    # A forked child has everything imported; but CUDA, should an import have woken it, goes to no forked child
    is_spawned = setup.on_gpu or batch[0].part in OWN_PROCESS
    names = [(case.part, case.name) for case in batch]
    child = multiprocessing.get_context("spawn" if is_spawned else "fork").Process(
        target=run_cases, args=(names, setup, path, deadline)
    )
    with patch.dict(os.environ, first_gpu() if setup.on_gpu and batch[0].part != "sharded" else {}):
        child.start()
    try:
        child.join(max(0.0, deadline - time.monotonic()))
        return child.exitcode
    finally:
        if child.is_alive():  # with all that it has started: launchers put theirs into groups of their own
            for process in [*psutil.Process(child.pid).children(recursive=True), child]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        child.join()


def write(content: dict, path: Path) -> None:
    """Replace the file atomically."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(new, path)


def rows_of(path: Path, part: str) -> dict[str, dict]:
    """Return the rows of a part in the file, by case."""
    return json.loads(path.read_text())["parts"][part]["cases"]


def write_row(path: Path, part: str, case: str, row: dict) -> None:
    """Write the row of a case, and replace its earlier row."""
    content = json.loads(path.read_text())
    content["parts"][part]["cases"][case] = row
    write(content, path)


def time_of_alike(cases: dict[str, dict]) -> float:
    """Return the seconds of the longest case of a part, or 0: an estimate of the next case's least time."""
    return max((row["took_s"] for row in cases.values() if not {"error", "skipped"} & row.keys()), default=0.0)


def run_cases(names: Sequence[tuple[str, str]], setup: Setup, path: Path, deadline: float) -> None:
    """
    Run cases (part and name), and write a row after each. An error is written as a row, too, and ends the process.

    Skips a case if a similar one took longer than the time until the `deadline` (of `time.monotonic`).
    """
    for part, case in names:
        if time.monotonic() + time_of_alike(rows_of(path, part)) >= deadline:
            continue
        write_row(path, part, case, {"error": UNFINISHED})
        print(f"{part}: {case} ...", flush=True)
        start = time.perf_counter()
        try:
            row = PARTS[part](setup)[case].measure()
        except Exception as error:  # of whatever kind: the other cases are to run all the same
            row = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc().splitlines()[-12:]}
        row["took_s"] = round(time.perf_counter() - start, 2)
        write_row(path, part, case, row)
        print(f"{part}: {case}: {row.get('error', 'done')} ({row['took_s']:.1f} s)", flush=True)
        if "error" in row:
            raise SystemExit(CASE_RAISED)
