"""
Tables and figure of the study of time to accuracy, from the runs in `benchmarks/results/`.

    python -m benchmarks.pages          # writes the tables into the page
    python -m benchmarks.study_figures  # draws docs/time.png

Rules, and what the pilots fixed: `studies/time_chat_pilot.yaml` and `studies/time_server.yaml`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import yaml

from bapo_trl.compare.figure import curve_over, save_figure
from bapo_trl.compare.results import mean_accuracy
from bapo_trl.compare.tables import Targets, compare, markdown, relative_costs
from bapo_trl.compare.target import to_target
from benchmarks.common import ROOT, rows


STUDIES = {"time_server": ("wall", (0.45, 0.5))}
"""Clock and targets of each study."""
PLANNED = "TRL, 5e-4", "recommendation"
"""The baseline, and the method that was compared with it by plan."""


def arms_of(study: str) -> list[str]:
    """Return the methods in the order of the study's file."""
    return list(yaml.safe_load((ROOT / f"benchmarks/studies/{study}.yaml").read_text())["arms"])


def targets_of(study: str, target: float, arms: Sequence[str]) -> Targets:
    """Return what the runs of some methods took to an accuracy, by method and seed."""
    clock, _ = STUDIES[study]
    found: Targets = {arm: {} for arm in arms}
    for row in rows(study):
        if row.arm in found:
            found[row.arm][row.seed] = to_target(row.curve, row.costs, target, clock)
    return found


def recommendation_table(study: str) -> str:
    """Return TRL's seconds and the recommendation's to each target, by seed, and their ratio with its interval."""
    baseline, recommendation = PLANNED
    lines = []
    for target in STUDIES[study][1]:
        by_arm = targets_of(study, target, PLANNED)
        seconds = [" / ".join(map(_seconds, by_seed.values())) for by_seed in by_arm.values()]
        ratios = [relative_costs(by_arm, baseline, name)[recommendation] for name in ("seconds", "tokens")]
        lines.append([f"{target:.2f}", *seconds, *ratios])
    header = [f"seconds, {baseline} (seeds)", f"seconds, {recommendation}", "ratio of seconds", "ratio of tokens"]
    return markdown(["accuracy", *header], lines)


def methods_table(study: str) -> str:
    """
    Return a line for each method: how many runs reached each target, seconds and tokens to it relative to TRL's, what
    a whole run took, the mean accuracy while the shortest run lasted, and the final accuracy.
    """
    clock, targets = STUDIES[study]
    curves = {(row.arm, row.seed): curve_over(row, clock) for row in rows(study)}
    shortest = min(curve[-1][0] for curve in curves.values())
    lines = {arm: [arm] for arm in arms_of(study)}
    for target in targets:
        by_arm = targets_of(study, target, list(lines))
        seconds, tokens = (relative_costs(by_arm, PLANNED[0], name, False) for name in ("seconds", "tokens"))
        for arm, line in lines.items():
            reached = [each["reached"] for each in by_arm[arm].values()]
            line += [f"{sum(reached)} of {len(reached)}", seconds.get(arm, "-"), tokens.get(arm, "-")]
    for arm, line in lines.items():
        of_arm = [curve for (each, _), curve in curves.items() if each == arm]
        whole = fmean(curve[-1][0] for curve in of_arm)
        early = fmean(mean_until(curve, shortest) for curve in of_arm)
        final = fmean(row.final for row in rows(study) if row.arm == arm)
        line += [f"{whole:.0f}", f"{early:.3f}", f"{final:.3f}"]
    header = [part for target in targets for part in (f"reached {target:.2f}", "seconds", "tokens")]
    header += ["seconds of a run", f"mean accuracy of the first {shortest:.0f} seconds", "final accuracy"]
    return markdown(["method", *header], lines.values())


def mean_until(curve: Sequence[tuple[float, float]], end: float) -> float:
    """Return the mean of the line through the points of a curve, from its first point to `end`, at most its last."""
    places, values = zip(*curve, strict=True)
    return mean_accuracy([*(point for point in curve if point[0] < end), (end, float(np.interp(end, places, values)))])


def draw_courses(path: Path) -> None:
    """Draw the accuracy of TRL's trainer and of the parts of the recommendation over time."""
    arms = {
        PLANNED[0]: "GRPOTrainer",
        "GRPO, 1": "ours, 1 update per generation",
        "VESPO, 16": "VESPO, 16 updates per generation",
        PLANNED[1]: "and overlap, 2 passes, vLLM's logps",
    }
    runs = [replace(row, arm=arms[row.arm]) for row in rows("time_server") if row.arm in arms]
    first, *_ = arms.values()
    save_figure(compare(runs, list(arms.values()), first), path, STUDIES["time_server"][0])


def _seconds(found: Mapping[str, Any]) -> str:
    return f"{found['seconds']:.0f}" if found["reached"] else f"over {found['seconds']:.0f}"
