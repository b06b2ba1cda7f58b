"""
Draw docs/contribution.png: the positive contribution that clip bounds, and a weight on negative tokens, can reach.

    python docs/tools/draw_contribution.py

A calculation: 35 % of the tokens have a positive advantage, all advantages have the same size, and importance ratios
are lognormal with a mean of 1. The bounds are the defaults of `BAPOConfig`.
"""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from scipy.stats import norm

from bapo_trl.clip_bounds.config import BoundSearchConfig
from benchmarks.pictures import save_panel


PICTURE = Path(__file__).resolve().parents[1] / "contribution.png"
POSITIVE_TOKENS, WEIGHT = 0.35, 0.05
START, BOUNDS, WEIGHTED = "#000000", "#D55E00", "#0072B2"  # of Okabe and Ito


def positive_contribution(spread: np.ndarray, low: float, high: float, weight: float = 1.0) -> np.ndarray:
    """Return P / (P + w N) for log-ratios of a standard deviation above 0."""

    def part_below(bound: float) -> np.ndarray:
        return norm.cdf(np.log(bound) / spread - spread / 2)  # of the sum of all ratios

    positive = POSITIVE_TOKENS * part_below(high)
    negative = (1 - POSITIVE_TOKENS) * (1 - part_below(low))
    return positive / (positive + weight * negative)


def draw(path: Path) -> None:
    """Write the picture."""
    settings = BoundSearchConfig()
    grid = settings.bound_grid
    spread = np.linspace(0.001, 1, 400)
    start = positive_contribution(spread, grid.lower_start, grid.upper_start)
    end = positive_contribution(spread, grid.lower_max, grid.upper_max)
    weighted = positive_contribution(spread, grid.lower_max, grid.upper_max, WEIGHT)
    figure = Figure(figsize=(8, 4.4), layout="constrained")
    axes = figure.subplots()
    axes.fill_between(spread, end, weighted, color=WEIGHTED, alpha=0.15, linewidth=0)
    axes.fill_between(spread, start, end, color=BOUNDS, alpha=0.3, linewidth=0)
    axes.plot(spread, weighted, color=WEIGHTED, linewidth=2.5)
    axes.plot(spread, end, color=BOUNDS, linewidth=2.5)
    axes.plot(spread, start, color=START, linewidth=2.5)
    axes.axhline(settings.positive_contribution_target, color="0.4", linestyle="--", linewidth=1.5)
    for place, height, text in (
        (0.2, 0.86, f"bounds at their end, negative tokens with weight {WEIGHT:g}"),
        (0.5, 0.68, "within reach of the weight"),
        (0.5, 0.515, "default target"),
        (0.5, 0.45, "bounds at their end"),
        (0.5, 0.33, "within reach of the bounds"),
        (0.5, 0.165, "bounds at their start"),
    ):
        axes.text(place, height, text, fontsize=12)
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    title = "Clip bounds move the positive contribution less than a weight does"
    x = "standard deviation of the log-ratios (grows with staleness)"
    save_panel(figure, axes, path, x, "positive contribution", title)


if __name__ == "__main__":
    draw(PICTURE)
    print(f"Written: {PICTURE.name}")
