"""The figure of a study: accuracy over the updates, a panel for each setting, a line with its band for each arm."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from ..report.figure import color_of
from .statistics import mean_over_seeds
from .study import name_setting
from .tables import Comparison


def save_figure(comparisons: Sequence[Comparison], path: Path) -> None:
    """Draw the accuracies of all arms, in at least one setting, into a PNG file; takes matplotlib (extra `plots`)."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"text.parse_math": False}):  # a `$` in the name of an arm is a `$`
        _draw(comparisons, Figure).savefig(path, dpi=110)


def _draw(comparisons: Sequence[Comparison], make_figure: Any) -> Any:
    count = len(comparisons)
    columns = min(count, 3)
    lines = -(-count // columns)
    figure = make_figure(figsize=(4.6 * columns, 3.4 * lines + 0.6), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False, sharey=True).flatten()
    colors = {
        arm: color_of(place) for place, arm in enumerate(dict.fromkeys(chain(*(each.arms for each in comparisons))))
    }
    shown = {}
    for panel, comparison in zip(axes, comparisons, strict=False):
        for arm, rows in comparison.arms.items():
            accuracies: dict[int, list[float]] = {}
            for step, accuracy in (point for row in rows if row.error is None for point in row.curve):
                accuracies.setdefault(step, []).append(accuracy)
            steps = sorted(accuracies)
            means = [mean_over_seeds(accuracies[step]) for step in steps]
            (shown[arm],) = panel.plot(steps, [mean.value for mean in means], color=colors[arm], label=arm)
            with_band = [(step, mean) for step, mean in zip(steps, means, strict=True) if mean.count > 1]
            panel.fill_between(
                [step for step, _ in with_band],
                [mean.value - mean.half_width for _, mean in with_band],
                [mean.value + mean.half_width for _, mean in with_band],
                color=colors[arm],
                alpha=0.15,
                linewidth=0,
            )
        panel.set(title=name_setting(comparison.over), xlabel="updates")
        panel.grid(alpha=0.25)
    for panel in axes[count:]:
        panel.set_axis_off()
    for panel in axes[::columns]:
        panel.set_ylabel("accuracy (band: 95 % interval)")
    axes[0].set_ylim(max(0.0, axes[0].get_ylim()[0]), min(1.0, axes[0].get_ylim()[1]))
    figure.legend(
        list(shown.values()), list(shown), loc="outside lower center", ncols=min(4, len(shown)), frameon=False
    )
    return figure
