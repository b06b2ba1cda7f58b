"""
Draw the figure of a study: accuracy over the updates, with a panel per setting and a line per method.

Each line is a mean over seeds, with its 95 % interval as a band; with too few seeds, with a thin line for each seed.
"""

import math
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean

from .results import Row
from .statistics import mean_over_seeds
from .study import name_setting
from .tables import FEWEST_SEEDS, Comparison, within


AXES = {"updates": "updates", "wall": "seconds", "cpu": "CPU seconds", "tokens": "generated tokens"}
"""Labels of the x-axis, by what it shows."""


def save_figure(comparisons: Sequence[Comparison], path: Path, axis: str = "updates") -> None:
    """
    Save the figure of at least one comparison as a PNG file. Needs matplotlib (extra `plots`).

    `axis` is a key of `AXES`. Other than by updates, the runs of a method are drawn at the mean over its seeds of what
    a measurement cost; a run that has not logged the cost is left out.
    """
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure

    count = len(comparisons)
    columns = min(count, 3)
    lines = -(-count // columns)
    arms = dict.fromkeys(arm for each in comparisons for arm in each.arms)
    width, widest = 4.6 * columns, 0.6 + 0.08 * max(map(len, arms))  # inches of the figure, and of a legend entry
    entries = max(1, min(int(width / widest), len(arms)))  # in a line of the legend
    figure = Figure(figsize=(width, 3.4 * lines + 0.4 + 0.22 * math.ceil(len(arms) / entries)), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False, sharey=True).flatten()
    colors = {arm: f"C{place}" for place, arm in enumerate(arms)}
    shown = {}
    for panel, comparison in zip(axes, comparisons, strict=False):
        for arm, rows in comparison.arms.items():
            curves = [curve for row in rows if row.error is None and (curve := curve_over(row, axis))]
            accuracies: dict[int, list[float]] = {}
            costs: dict[int, list[float]] = {}
            for place, (cost, accuracy) in chain(*map(enumerate, curves)):
                accuracies.setdefault(place, []).append(accuracy)
                costs.setdefault(place, []).append(cost)
            steps = [fmean(costs[place]) for place in sorted(costs)]
            means = [within(mean_over_seeds(accuracies[place]), 1.0) for place in sorted(costs)]
            (shown[arm],) = panel.plot(steps, [mean.value for mean in means], color=colors[arm], label=arm)
            if len(curves) < FEWEST_SEEDS:  # too few for a useful interval
                panel.add_collection(LineCollection(curves, colors=colors[arm], linewidths=0.8, alpha=0.5))
                panel.autoscale_view()
            else:
                low, high = ([mean.value + sign * mean.half_width for mean in means] for sign in (-1, 1))
                panel.fill_between(steps, low, high, color=colors[arm], alpha=0.15, linewidth=0)
        panel.set(title=name_setting(comparison.sweep), xlabel=AXES[axis])
        panel.grid(alpha=0.25)
        panel.locator_params(axis="x", nbins=6)
    for panel in axes[count:]:
        panel.set_axis_off()
    for panel in axes[::columns]:
        panel.set_ylabel("accuracy")
    axes[0].set_ylim(max(0.0, axes[0].get_ylim()[0]), min(1.0, axes[0].get_ylim()[1]))
    figure.legend(
        shown.values(), shown, loc="outside lower center", ncols=entries, frameon=False,
        title="band: 95 % interval, thin lines: seeds", title_fontsize="small",
    )  # fmt: skip
    figure.savefig(path, dpi=110)


def curve_over(row: Row, axis: str) -> list[tuple[float, float]]:
    """Return cost and accuracy of each measurement of a run; empty if the cost was not logged."""
    if axis == "updates":
        return [(float(step), accuracy) for step, accuracy in row.curve]
    costs = [cost.get(axis) for cost in row.costs]
    points = zip(costs, row.curve, strict=False)
    return [(cost, accuracy) for cost, (_, accuracy) in points if cost is not None] if None not in costs else []
