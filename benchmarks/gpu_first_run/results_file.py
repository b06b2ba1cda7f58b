"""The file of a run, written after each case, so that a call that is cut leaves a complete one."""

import json
import os
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_first_run.parts import PARTS
from benchmarks.gpu_first_run.trainers import Setup


CASE_RAISED = 3  # exit code of a process whose last case raised: the others get another one
UNFINISHED = "did not end"


def write(content: dict, path: Path) -> None:
    """Replace the file as a whole."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(new, path)


def write_row(path: Path, part: str, case: str, row: dict) -> None:
    """Write the row of a case in place of what the file has of it."""
    content = json.loads(path.read_text())
    content["parts"][part]["cases"][case] = row
    write(content, path)


def time_of_alike(cases: dict[str, dict]) -> float:
    """Return the seconds that the longest case of a part took, 0 without one: what the next one will take at least."""
    return max((row["took_s"] for row in cases.values() if not {"error", "skipped"} & row.keys()), default=0.0)


def run_cases(names: Sequence[tuple[str, str]], setup: Setup, path: Path, deadline: float) -> None:
    """
    Run cases (part and name of each), and write each as it ends. One that raises is a row, too, and ends the process.

    Skips a case whose like took longer than what is left until the `deadline` (of `time.monotonic`).
    """
    for part, case in names:
        done = json.loads(path.read_text())["parts"][part]["cases"]
        if time.monotonic() + time_of_alike(done) >= deadline:
            continue
        write_row(path, part, case, {"error": UNFINISHED})
        print(f"{part}: {case} ...", flush=True)
        start = time.perf_counter()
        try:
            row = PARTS[part].cases(setup)[case].measure()
        except Exception as error:  # of whatever kind: the other cases are to run all the same
            row = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc().splitlines()[-12:]}
        row["took_s"] = round(time.perf_counter() - start, 2)
        write_row(path, part, case, row)
        print(f"{part}: {case}: {row.get('error', 'done')} ({row['took_s']:.1f} s)", flush=True)
        if "error" in row:
            raise SystemExit(CASE_RAISED)
