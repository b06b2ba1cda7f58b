"""
Tables and figure of the study of time to accuracy, from the runs in `benchmarks/results/`.

    python -m benchmarks.pages          # writes the tables into the page
    python -m benchmarks.study_figures  # draws docs/time.png

Rules, and what the pilots fixed: `studies/time_chat_pilot.yaml` and `studies/time_server.yaml`.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

from bapo_trl.compare.figure import curve_over
from bapo_trl.compare.results import Row
from bapo_trl.compare.statistics import differences, mean_over_seeds
from bapo_trl.compare.tables import Comparison, compare, cost_table, markdown, with_interval
from bapo_trl.compare.target import to_target


def arms_of(runs: Sequence[Row]) -> list[str]:
    """Return the methods in the order of the study's file, in which each seed has them."""
    return list(dict.fromkeys(row.arm for row in runs))


def by_target(runs: Sequence[Row], target: float, clock: str, baseline: str) -> Comparison:
    """Return a comparison by what the runs took to an accuracy; `clock` is "wall" or "cpu"."""
    found = [replace(row, to_target=to_target(row.curve, row.costs, target, clock)) for row in runs]
    (comparison,) = compare(found, arms_of(runs), baseline)
    return comparison


def target_table(runs: Sequence[Row], target: float, clock: str, baseline: str) -> str:
    """Return what each method took to an accuracy, relative to the baseline over common seeds."""
    return cost_table(by_target(runs, target, clock, baseline))


def mean_until(curve: Sequence[tuple[float, float]], end: float) -> float:
    """Return the mean of a curve, a line between its points, from its first point to `end`, at most its last one."""
    area = 0.0
    for (left, low), (right, high) in pairwise(curve):
        if left < end:
            stop = min(right, end)
            area += (stop - left) * (low + low + (high - low) * (stop - left) / (right - left)) / 2
    return area / (end - curve[0][0])


def course_table(runs: Sequence[Row], clock: str, baseline: str) -> str:
    """
    Return a line for each method: time and tokens of a run, the mean accuracy while the shortest run lasted, the final
    accuracy, and its difference from the baseline's over common seeds, with an interval by Holm for all methods.
    """
    curves = {(row.arm, row.seed): curve_over(row, clock) for row in runs}
    shortest = min(curve[-1][0] for curve in curves.values())
    finals = {arm: {row.seed: row.final for row in runs if row.arm == arm} for arm in arms_of(runs)}
    found = {each.arm: each.mean for each in differences(finals, [(arm, baseline) for arm in finals if arm != baseline])}
    lines = []
    for arm, by_seed in finals.items():
        own = [row for row in runs if row.arm == arm]
        ends = [curves[arm, row.seed][-1][0] for row in own]
        early = [mean_until(curves[arm, row.seed], shortest) for row in own]
        lines.append(
            [
                arm,
                str(len(own)),
                f"{fmean(ends):.0f}",
                f"{fmean(row.generated_tokens for row in own) / 1000:.0f}",
                f"{fmean(early):.3f}",
                with_interval(mean_over_seeds(list(by_seed.values())), ".3f"),
                with_interval(found.get(arm), ".3f", "+"),
            ]
        )
    unit = "CPU-seconds" if clock == "cpu" else "seconds"
    header = ["method", "seeds", unit, "1,000 tokens", f"mean accuracy of the first {shortest:.0f} {unit}"]
    return markdown([*header, "final accuracy", f"difference from {baseline}"], lines)
