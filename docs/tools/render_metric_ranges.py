"""
Write the table of seen values in docs/metrics.md from the runs of the stability study.

    python docs/tools/render_metric_ranges.py
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from render_knobs import with_table


ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "metrics.md"
RESULTS = ROOT / "benchmarks" / "results" / "stability.json"
METRICS = (
    "ratio/min", "ratio/max", "ratio/ess", "ratio/kl", "bapo/clip_low", "bapo/clip_high", "bapo/positive_share",
    "bapo/positive_share_initial", "clip_ratio/region_mean", "grad_norm", "entropy",
)  # fmt: skip
COLUMNS = {  # purpose, task, updates per generation, learning rate
    "hard, 4": ("reported", "running_totals", "4", 2e-4),
    "hard, 16": ("reported", "running_totals", "16", 2e-4),
    "hard, 64": ("reported", "running_totals", "64", 2e-4),
    "hard, 64, rate x 2": ("pilot", "running_totals", "64", 4e-4),
    "easy, 64": ("reported", "sums", "64", 5e-4),
    "easy, 64, rate x 2": ("pilot", "sums", "64", 1e-3),
}


def runs_of(results: Sequence[dict], purpose: str, task: str, staleness: str, learning_rate: float) -> list[dict]:
    """Return the runs of BAPO with its defaults in one setting."""
    names = ("purpose", "task", "staleness_setting", "learning_rate", "arm")
    wanted = (purpose, task, staleness, learning_rate, "BAPO")
    runs = [run for run in results if tuple(run[name] for name in names) == wanted]
    if not runs:
        raise ValueError(f"{RESULTS.name} has no run of {wanted}: name in `COLUMNS` what it has.")
    return runs


def seen(runs: Sequence[dict], metric: str) -> str:
    """Return the median of a metric, with the range of nine tenths of its values."""
    values = sorted(value for run in runs for value in run["bins"][metric] if value is not None)
    low, middle, high = (values[round(share * (len(values) - 1))] for share in (0.05, 0.5, 0.95))
    return f"{middle:.3g} ({low:.3g} to {high:.3g})"


def table(results: Sequence[dict]) -> str:
    """Return a Markdown table: a row for each metric, a column for each setting."""
    columns = [runs_of(results, *setting) for setting in COLUMNS.values()]
    accuracy = [f"{statistics.mean(run['final'] for run in runs):.2f}" for runs in columns]
    rows = [["final accuracy", *accuracy]]
    rows += [[f"`{metric}`", *(seen(runs, metric) for runs in columns)] for metric in METRICS]
    header = ["", *COLUMNS]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, ["---"] * len(header), *rows])


def page() -> str:
    """Return the page with its table as of the results."""
    results = json.loads(RESULTS.read_text())["results"]
    return with_table(PAGE.read_text(), table(results), "render_metric_ranges")


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"Written: {PAGE.relative_to(ROOT)}")
