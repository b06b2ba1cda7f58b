"""The file of a run, written anew after each case, so that a call that is cut leaves a whole one."""

import json
import os
import time
import traceback
from pathlib import Path

from benchmarks.gpu_first_run.parts import PARTS, Setup


PASSED_LIMIT = 3  # exit code of a part that has cases left


def write(content: dict, path: Path) -> None:
    """Replace the file as a whole."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(new, path)


def run_part(name: str, setup: Setup, path: Path) -> None:
    """
    Run the cases of a part that the file lacks, and write each as it ends. A case that raises is a row, too.

    Ends the process with [`PASSED_LIMIT`] where the next case would begin after the part's time limit.
    """
    limit = time.perf_counter() + PARTS[name].limit_s
    has_begun = False
    done = json.loads(path.read_text())["parts"][name]["cases"]
    cases = PARTS[name].cases(setup)
    for case in sorted(cases, key=lambda case: case in done):  # one that failed comes again, after the others
        if case in done and "error" not in done[case]:
            continue
        if has_begun and time.perf_counter() > limit:
            raise SystemExit(PASSED_LIMIT)
        has_begun = True
        start = time.perf_counter()
        try:
            row = cases[case]()
        except Exception as error:  # of whatever kind: the other cases of a part are to run all the same
            row = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc().splitlines()[-12:]}
        row["took_s"] = round(time.perf_counter() - start, 2)
        content = json.loads(path.read_text())
        content["parts"][name]["cases"][case] = row
        write(content, path)
        print(f"{name}: {case}: {row.get('error', 'done')} ({row['took_s']:.1f} s)", flush=True)
