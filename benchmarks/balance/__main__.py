"""Make the runs of the study that have no rows yet, and write its result."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import benchmarks.balance
from benchmarks.common import ROOT, earlier_runs, result_path, save_result
from benchmarks.run_pool import run_all
from benchmarks.stability.plan import Run
from benchmarks.stability.rows import rows_of

from .arms import ARMS, REPEATED
from .plan import PRESET, SEEDS, K, make_study


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.balance",
        description=benchmarks.balance.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; 0: write what is finished, make none")
    parser.add_argument("--arms", nargs="+", choices=[*ARMS, *REPEATED], default=[*ARMS, *REPEATED], help="(all)")
    parser.add_argument("--finished", type=Path, default=ROOT / "outputs" / "balance.jsonl", help="finished runs")
    arguments = parser.parse_args(argv)
    path = result_path("balance", "cpu")
    old = json.loads(path.read_text()) if path.exists() else {"results": []}
    first_study = json.loads(result_path("stability", "cpu").read_text())["results"]
    rows = {row["key"]: row for row in old["results"]}
    preset = replace(PRESET, rows=rows)

    def make(runs: Sequence[Run]) -> list[dict]:
        return rows_of(runs, preset, rows, lambda specs: run_all(specs, arguments.finished, arguments.jobs))

    make_study(make, first_study, arguments.arms)
    if len(rows) > len(old["results"]):
        settings = {"arms": [*ARMS, *REPEATED], "seeds": SEEDS, "k": K, "threads": 1}
        save_result("balance", "cpu", settings, list(rows.values()), earlier_runs(old))


if __name__ == "__main__":
    main()
