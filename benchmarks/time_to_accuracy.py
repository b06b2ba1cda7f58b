"""
Tables and figures of the studies of time to accuracy, from the runs in `benchmarks/results/`.

    python -m benchmarks.pages          # writes the tables into the page
    python -m benchmarks.study_figures  # draws docs/time.png, and time_*.png into benchmarks/reports/

Rules, and what the pilots fixed: `studies/time_chat_pilot.yaml` and `studies/time_server.yaml`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import yaml

from bapo_trl.compare.figure import AXES, curve_over, save_figure
from bapo_trl.compare.results import mean_accuracy
from bapo_trl.compare.tables import Targets, compare, markdown, relative_costs
from bapo_trl.compare.target import to_target
from benchmarks.common import ROOT, rows


RECOMMENDATION = "recommendation"


class Plan(NamedTuple):
    """What a study measures by plan."""

    clock: str
    targets: tuple[float, ...]
    baseline: str  # that the others are compared with

    @property
    def arms(self) -> tuple[str, str]:
        """Methods of the comparison."""
        return self.baseline, RECOMMENDATION


SERVER = Plan("wall", (0.45, 0.5), "TRL, 5e-4")
AGAINST_TRL = {
    "time_server": SERVER,
    "time_server_longer": SERVER,
    "time_chat": Plan("cpu", (0.348, 0.429), "TRL"),
}
RECIPE, RECIPE_BASELINES = "time_recipe", ("TRL", "recipe")
STUDIES = {**AGAINST_TRL, RECIPE: Plan("cpu", (0.5,), "TRL")}


def arms_of(study: str) -> list[str]:
    """Return the methods that have runs, in the order of the study's file."""
    arms = yaml.safe_load((ROOT / f"benchmarks/studies/{study}.yaml").read_text())["arms"]
    return [arm for arm in arms if any(row.arm == arm for row in rows(study))]


def targets_of(study: str, target: float, arms: Sequence[str]) -> Targets:
    """Return what the runs of some methods took to an accuracy, by method and seed."""
    found: Targets = {arm: {} for arm in arms}
    for row in rows(study):
        if row.arm in found:
            found[row.arm][row.seed] = to_target(row.curve, row.costs, target, STUDIES[study].clock)
    return found


def recommendation_table(study: str) -> str:
    """Return TRL's seconds and the recommendation's to each target, by seed, and their ratio with its interval."""
    plan = STUDIES[study]
    unit, lines = AXES[plan.clock], []
    for target in plan.targets:
        by_arm = targets_of(study, target, plan.arms)
        seconds = [" / ".join(map(_seconds, by_seed.values())) for by_seed in by_arm.values()]
        ratios = [relative_costs(by_arm, plan.baseline, name)[RECOMMENDATION] for name in ("seconds", "tokens")]
        lines.append([f"{target:g}", *seconds, *ratios])
    header = [f"{unit}, {plan.baseline} (seeds)", f"{unit}, {RECOMMENDATION}"]
    return markdown(["accuracy", *header, f"ratio of {unit}", "ratio of tokens"], lines)


def methods_table(study: str) -> str:
    """
    Return a line for each method: how many runs reached each target, seconds and tokens to it relative to TRL's, what
    a whole run took, the mean accuracy while the shortest run lasted, and the final accuracy.
    """
    plan = STUDIES[study]
    unit = AXES[plan.clock]
    curves = {(row.arm, row.seed): curve_over(row, plan.clock) for row in rows(study)}
    shortest = min(curve[-1][0] for curve in curves.values())
    lines = {arm: [arm] for arm in arms_of(study)}
    for target in plan.targets:
        by_arm = targets_of(study, target, list(lines))
        seconds, tokens = (relative_costs(by_arm, plan.baseline, name, False) for name in ("seconds", "tokens"))
        for arm, line in lines.items():
            reached = [each["reached"] for each in by_arm[arm].values()]
            line += [f"{sum(reached)} of {len(reached)}", seconds.get(arm, "-"), tokens.get(arm, "-")]
    for arm, line in lines.items():
        of_arm = [curve for (each, _), curve in curves.items() if each == arm]
        whole = fmean(curve[-1][0] for curve in of_arm)
        early = fmean(mean_until(curve, shortest) for curve in of_arm)
        final = fmean(row.final for row in rows(study) if row.arm == arm)
        line += [f"{whole:.0f}", f"{early:.3f}", f"{final:.3f}"]
    header = [part for target in plan.targets for part in (f"reached {target:g}", unit, "tokens")]
    header += [f"{unit} of a run", f"mean accuracy of the first {shortest:.0f} {unit}", "final accuracy"]
    return markdown(["method", *header], lines.values())


def phases_table() -> str:
    """Return the recipe study's methods: cost of the target, its ratios to that of two methods, and a run's phases."""
    plan = STUDIES[RECIPE]
    unit, (target,) = AXES[plan.clock], plan.targets
    by_arm = targets_of(RECIPE, target, arms_of(RECIPE))
    ratios = [relative_costs(by_arm, baseline, "seconds") for baseline in RECIPE_BASELINES]
    phases, lines = ("generation", "scoring", "training"), []
    for arm, by_seed in by_arm.items():
        of_arm = [row.phases for row in rows(RECIPE) if row.arm == arm]
        seconds = [f"{fmean(each[name] for each in of_arm):.0f}" for name in phases]
        lines.append(
            [arm, " / ".join(map(_seconds, by_seed.values())), *(of.get(arm, "-") for of in ratios), *seconds]
        )
    header = [f"{unit} to {target:g} (seeds)", *(f"ratio to {baseline}" for baseline in RECIPE_BASELINES)]
    return markdown(["method", *header, *(f"wall seconds of {name}" for name in phases)], lines)


def at_equal_time(study: str) -> dict[str, dict[int, float]]:
    """Return the accuracy of the baseline and of the recommendation, by seed, when the baseline's run ends."""
    plan = STUDIES[study]
    curves = {(row.arm, row.seed): curve_over(row, plan.clock) for row in rows(study)}
    ends = {seed: curve[-1][0] for (arm, seed), curve in curves.items() if arm == plan.baseline}
    return {
        arm: {seed: float(np.interp(end, *zip(*curves[arm, seed], strict=True))) for seed, end in ends.items()}
        for arm in plan.arms
    }


def mean_until(curve: Sequence[tuple[float, float]], end: float) -> float:
    """Return the mean of the line through the points of a curve, from its first point to `end`, at most its last."""
    places, values = zip(*curve, strict=True)
    return mean_accuracy([*(point for point in curve if point[0] < end), (end, float(np.interp(end, places, values)))])


def draw_courses(study: str, arms: Mapping[str, str], path: Path) -> None:
    """Draw the accuracy of some methods over time, each under its name in the figure."""
    runs = [replace(row, arm=arms[row.arm]) for row in rows(study) if row.arm in arms]
    first, *_ = arms.values()
    save_figure(compare(runs, list(arms.values()), first), path, STUDIES[study].clock)


def _seconds(found: Mapping[str, Any]) -> str:
    return f"{found['seconds']:.0f}" if found["reached"] else f"over {found['seconds']:.0f}"
