"""
Tables and figure of the study of time to accuracy, from the runs in `benchmarks/results/`.

    python -m benchmarks.pages          # writes the tables into the page
    python -m benchmarks.study_figures  # draws docs/time.png

Rules, and what the pilots fixed: `studies/time_chat_pilot.yaml` and `studies/time_server.yaml`.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import yaml

from bapo_trl.compare.figure import curve_over, save_figure
from bapo_trl.compare.results import Row, read_rows
from bapo_trl.compare.tables import Comparison, compare, markdown, relative_costs
from bapo_trl.compare.target import to_target
from benchmarks.common import RESULTS, ROOT


STUDIES = {"time_server": ("wall", (0.45, 0.5))}
"""Clock and targets of each study. Its first method is TRL's trainer, the baseline."""
RECOMMENDATION = "recommendation"


def rows(study: str) -> list[Row]:
    """Return the runs of a study."""
    return list(read_rows(RESULTS / f"{study}.json").values())


def arms_of(study: str) -> list[str]:
    """Return the methods in the order of the study's file."""
    return list(yaml.safe_load((ROOT / f"benchmarks/studies/{study}.yaml").read_text())["arms"])


def by_target(study: str, target: float, arms: Sequence[str]) -> Comparison:
    """Return a comparison of some methods with the first by what their runs took to an accuracy."""
    clock, _ = STUDIES[study]
    runs = [row for row in rows(study) if row.arm in arms]
    found = [replace(row, to_target=to_target(row.curve, row.costs, target, clock)) for row in runs]
    (comparison,) = compare(found, arms, arms[0])
    return comparison


def recommendation_table(study: str) -> str:
    """Return TRL's seconds and the recommendation's to each target, by seed, and their ratio with its interval."""
    baseline = arms_of(study)[0]
    lines = []
    for target in STUDIES[study][1]:
        comparison = by_target(study, target, [baseline, RECOMMENDATION])
        seconds = [" / ".join(_seconds(row) for row in comparison.arms[arm]) for arm in (baseline, RECOMMENDATION)]
        ratios = [relative_costs(comparison, name)[RECOMMENDATION] for name in ("seconds", "tokens")]
        lines.append([f"{target:.2f}", *seconds, *ratios])
    clock = _unit(study)
    header = [f"{clock}, {baseline} (seeds)", f"{clock}, {RECOMMENDATION}", f"ratio of {clock}", "ratio of tokens"]
    return markdown(["accuracy", *header], lines)


def methods_table(study: str) -> str:
    """
    Return a line for each method: how many runs reached each target, seconds and tokens to it relative to TRL's, what
    a whole run took, the mean accuracy while the shortest run lasted, and the final accuracy.
    """
    clock, targets = STUDIES[study]
    arms = arms_of(study)
    comparisons = [by_target(study, target, arms) for target in targets]
    ratios = [
        [relative_costs(comparison, name, has_interval=False) for name in ("seconds", "tokens")]
        for comparison in comparisons
    ]
    curves = {(row.arm, row.seed): curve_over(row, clock) for row in rows(study)}
    shortest = min(curve[-1][0] for curve in curves.values())
    lines = []
    for arm in arms:
        runs = comparisons[0].arms[arm]
        line = [arm]
        for comparison, (seconds, tokens) in zip(comparisons, ratios, strict=True):
            reached = sum(row.to_target["reached"] for row in comparison.arms[arm])
            line += [f"{reached} of {len(runs)}", seconds[arm], tokens[arm]]
        whole = fmean(curves[arm, row.seed][-1][0] for row in runs)
        early = fmean(mean_until(curves[arm, row.seed], shortest) for row in runs)
        final = fmean(row.final for row in runs)
        lines.append([*line, f"{whole:.0f}", f"{early:.3f}", f"{final:.3f}"])
    header = [part for target in targets for part in (f"reached {target:.2f}", "seconds", "tokens")]
    early = f"mean accuracy of the first {shortest:.0f} seconds"
    return markdown(["method", *header, "seconds of a run", early, "final accuracy"], lines)


def mean_until(curve: Sequence[tuple[float, float]], end: float) -> float:
    """Return the mean of a curve, a line between its points, from its first point to `end`, at most its last one."""
    area = 0.0
    for (left, low), (right, high) in pairwise(curve):
        if left < end:
            stop = min(right, end)
            area += (stop - left) * (low + low + (high - low) * (stop - left) / (right - left)) / 2
    return area / (end - curve[0][0])


def draw_courses(path: Path) -> None:
    """Draw the accuracy of TRL's trainer and of the parts of the recommendation over time."""
    arms = {
        "TRL, 5e-4": "GRPOTrainer",
        "GRPO, 1": "ours, 1 update per generation",
        "VESPO, 16": "VESPO, 16 updates per generation",
        RECOMMENDATION: "and overlap, 2 passes, vLLM's logps",
    }
    runs = [replace(row, arm=arms[row.arm]) for row in rows("time_server") if row.arm in arms]
    first, *_ = arms.values()
    save_figure(compare(runs, list(arms.values()), first), path, STUDIES["time_server"][0])


def _seconds(row: Row) -> str:
    found = row.to_target
    return f"{found['seconds']:.0f}" if found["reached"] else f"over {found['seconds']:.0f}"


def _unit(study: str) -> str:
    return "CPU-seconds" if STUDIES[study][0] == "cpu" else "seconds"
