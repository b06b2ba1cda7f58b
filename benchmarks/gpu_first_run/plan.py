"""Which case comes when, and the processes that run them within the time limit."""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from unittest.mock import patch

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

    @property
    def process(self) -> str | None:
        """What runs it: a process of its own, by a name, or the one that cases share."""
        return f"{self.part}: {self.name}" if PARTS[self.part].own_process else None


def make_plan(parts: Sequence[str], setup: Setup) -> list[Planned]:
    """Return the cases of all parts that can run here: the first stage of each part, then the second, and so on."""
    cases = [
        Planned(part, name, case.stage, case.environment)
        for part in parts
        if PARTS[part].lacks(setup) is None
        for name, case in PARTS[part].cases(setup).items()
    ]
    return sorted(cases, key=lambda case: case.stage)


def run_plan(plan: Sequence[Planned], setup: Setup, path: Path, deadline: float) -> None:
    """Run the cases that the file lacks, until all are there or the next would end after the deadline."""
    while batch := _next_batch(plan, path, deadline):
        before = _cases(path, batch[0].part)
        exit_code = _run_batch(batch, setup, path, deadline)
        for case in batch:
            row = _cases(path, case.part).get(case.name)
            if row == {"error": UNFINISHED}:
                why = "cut at the time limit" if exit_code is None else f"the process ended, exit code {exit_code}"
                write_row(path, case.part, case.name, {"error": why})
        if exit_code not in (0, None) and _cases(path, batch[0].part) == before:
            write_row(path, batch[0].part, batch[0].name, {"error": f"no process for it, exit code {exit_code}"})


def _cases(path: Path, part: str) -> dict[str, dict]:
    return json.loads(path.read_text())["parts"][part]["cases"]


def _next_batch(plan: Sequence[Planned], path: Path, deadline: float) -> list[Planned]:
    """Return the next case that fits into the time left, with those after it that share its process."""
    left = [
        case
        for case in plan
        if case.name not in _cases(path, case.part)
        and time.monotonic() + time_of_alike(_cases(path, case.part)) < deadline
    ]
    return [] if not left else list(takewhile(lambda case: case.process == left[0].process, left))


def _run_batch(batch: Sequence[Planned], setup: Setup, path: Path, deadline: float) -> int | None:
    """Run cases in a process, and return its exit code; `None` if it was cut at the deadline."""
    # A forked child has everything imported; but CUDA, should an import have woken it, goes to no forked child
    processes = multiprocessing.get_context("spawn" if setup.on_gpu or batch[0].process else "fork")
    names = [(case.part, case.name) for case in batch]
    child = processes.Process(target=_in_own_group, args=(names, setup, path, deadline))
    with patch.dict(os.environ, batch[0].environment):
        child.start()
    with _killed_at_the_end(child):
        child.join(max(0.0, deadline - time.monotonic()))
        return child.exitcode


def _in_own_group(*arguments) -> None:
    os.setpgid(0, 0)  # so that it ends with all that it started
    run_cases(*arguments)


@contextmanager
def _killed_at_the_end(child) -> Iterator[None]:
    try:
        yield
    finally:
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has ended, or has not come as far as its own group
            child.kill()
        child.join()
