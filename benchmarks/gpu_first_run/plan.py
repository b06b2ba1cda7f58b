"""Which case comes when, and the processes that run them within the time limit."""

import json
import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from unittest.mock import patch

import psutil

from benchmarks.gpu_first_run.parts import PARTS
from benchmarks.gpu_first_run.results_file import UNFINISHED, run_cases, time_of_alike, write_row
from benchmarks.gpu_first_run.trainers import Setup


@dataclass(frozen=True)
class Planned:
    """A case of the plan."""

    part: str
    name: str
    stage: int
    environment: Mapping[str, str]


def make_plan(parts: Sequence[str], setup: Setup) -> list[Planned]:
    """Return the cases that can run here: the first stage of each part, then the second, and so on."""
    cases = [
        Planned(part, name, case.stage, case.environment)
        for part in parts
        for name, case in PARTS[part].cases(setup).items()
        if case.lacks is None
    ]
    return sorted(cases, key=lambda case: case.stage)


def run_plan(plan: Sequence[Planned], setup: Setup, path: Path, deadline: float) -> None:
    """Run the cases that the file lacks, until all are there or the next would end after the deadline."""
    while batch := next_batch(plan, path, deadline):
        exit_code = _run(batch, setup, path, deadline)
        why = "cut at the time limit" if exit_code is None else f"the process ended, exit code {exit_code}"
        rows = [_cases(path, case.part).get(case.name) for case in batch]
        has_begun = any(row is not None for row in rows)
        for case, row in zip(batch, rows, strict=True):
            if row == {"error": UNFINISHED} or (not has_begun and exit_code not in (0, None)):
                write_row(path, case.part, case.name, {"error": why})


def _cases(path: Path, part: str) -> dict[str, dict]:
    return json.loads(path.read_text())["parts"][part]["cases"]


def next_batch(plan: Sequence[Planned], path: Path, deadline: float) -> list[Planned]:
    """Return the cases that come next in one process and fit into the time left."""
    left = [
        case
        for case in plan
        if case.name not in _cases(path, case.part)
        and time.monotonic() + time_of_alike(_cases(path, case.part)) < deadline
    ]
    if left and PARTS[left[0].part].own_process:
        return left[:1]
    return list(takewhile(lambda case: not PARTS[case.part].own_process, left))


def _run(batch: Sequence[Planned], setup: Setup, path: Path, deadline: float) -> int | None:
    """Run a process for a batch, and return its exit code; `None` if it was cut at the deadline."""
    # A forked child has everything imported; but CUDA, should an import have woken it, goes to no forked child
    is_spawned = setup.on_gpu or PARTS[batch[0].part].own_process
    names = [(case.part, case.name) for case in batch]
    child = multiprocessing.get_context("spawn" if is_spawned else "fork").Process(
        target=run_cases, args=(names, setup, path, deadline)
    )
    with patch.dict(os.environ, batch[0].environment):
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
