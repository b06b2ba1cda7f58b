"""The figure of the report: the panels that have data, side by side in a PNG."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .health import CUT_OFF_MAX, NO_SIGNAL_MAX
from .runs import Group, Points, Run
from .times import PHASES


class Line(NamedTuple):
    """A metric in a panel."""

    metric: str
    label: str
    over_seeds: str = "mean"  # part of the `Curve` of several seeds; a maximum is the "high", a minimum the "low" one


class Panel(NamedTuple):
    """A panel, whose first line is drawn with a band."""

    title: str
    lines: tuple[Line, ...]
    marks: tuple[tuple[str, float], ...] = ()  # dotted grey lines, with the name of the first of each name
    limits: tuple[float, float | None] | None = None  # of the axis; open above for `None`
    is_log: bool = False
    has_target: bool = False  # a line for each group that has a target
    is_stacked: bool = False  # bars, one on the other; drawn for a single group only


_FRACTION = (-0.03, 1.03)
_GREY = "0.45"
_STYLES = ("-", "--", ":")  # of the lines of a panel
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # Okabe and Ito's
MOST_PANELS = 9
_WIDTH = 4.2  # of a panel, in inches

ACCURACY = Panel("Accuracy (avg@k) or mean reward", (Line("accuracy", "accuracy"),), limits=(0.0, None))

PANELS = (
    Panel("Mean reward of the samples", (Line("reward", "reward"),)),
    ACCURACY,
    Panel(
        "Clip bounds (importance ratio)",
        (Line("bapo/clip_high", "upper bound"), Line("bapo/clip_low", "lower bound")),
        marks=(("ratio 1: on-policy", 1.0),),
    ),
    Panel(
        "Positive contribution (fraction of the loss)",
        (Line("bapo/positive_share", "as trained"), Line("bapo/positive_share_initial", "at start bounds")),
        limits=_FRACTION,
        has_target=True,
    ),
    Panel(
        "Time of an update (seconds)",
        tuple(Line(f"time/{name}", name) for name in PHASES),
        limits=(0.0, None),
        is_stacked=True,
    ),
    Panel("Entropy of the policy (nats per token)", (Line("entropy", "entropy"),), limits=(0.0, None)),
    Panel(
        "Cut off, zero advantage (fraction of samples)",
        (Line("completions/clipped_ratio", "cut off"), Line("frac_reward_zero_std", "zero advantage")),
        marks=((f"healthy: cut off < {CUT_OFF_MAX:g}, zero < {NO_SIGNAL_MAX:g}", CUT_OFF_MAX), ("", NO_SIGNAL_MAX)),
        limits=_FRACTION,
    ),
    Panel(
        "Importance ratios",
        (
            Line("ratio/mean", "mean"),
            Line("ratio/max", "largest", over_seeds="high"),
            Line("ratio/min", "smallest", over_seeds="low"),
        ),
        marks=(("healthy mean", 0.5), ("", 2.0)),
        is_log=True,
    ),
    Panel(
        "Staleness of samples (policy versions)",
        (Line("staleness/mean", "mean"), Line("staleness/max", "largest", over_seeds="high")),
        limits=(0.0, None),
    ),
    Panel(  # of the asynchronous trainer
        "Staleness of samples (weight transfers)",
        (Line("sample/staleness_mean", "mean"), Line("sample/staleness_max", "largest", over_seeds="high")),
        limits=(0.0, None),
    ),
    Panel(
        "Length of completions (tokens)",
        (Line("completions/mean_length", "mean"), Line("completions/max_length", "longest of a batch")),
    ),
)
"""All panels, the most important first."""


def drawn_panels(groups: Sequence[Group]) -> list[Panel]:
    """Return the panels for which some run has data, at most `MOST_PANELS`."""
    runs = [run for group in groups for run in group.runs]

    def has_data(panel: Panel, run: Run) -> bool:
        if panel is ACCURACY:
            return len(run.logs.accuracies(run.results).steps) > 0
        if panel.is_stacked and len(groups) > 1:
            return False
        return any(len(run.logs.points(line.metric).steps) for line in panel.lines)

    return [panel for panel in PANELS if any(has_data(panel, run) for run in runs)][:MOST_PANELS]


def save_png(groups: Sequence[Group], path: Path, panels: Sequence[Panel] = (), columns: int = 3) -> None:
    """Draw panels into one image, at most `columns` side by side; by default all that have data, at least one."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # not pyplot, which would choose a window and keep the figure
    from matplotlib.lines import Line2D

    panels = panels or drawn_panels(groups)
    columns = 2 if len(panels) == 4 else min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(_WIDTH * columns, 2.7 * rows + 0.5), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel, place in zip(panels, axes, strict=False):
        _draw(place, panel, groups)
    for place in axes[len(panels) :]:
        place.set_axis_off()
    if len(groups) > 1:
        handles = [Line2D([], [], color=f"C{index}", label=group.title) for index, group in enumerate(groups)]
        figure.legend(handles=handles, loc="outside upper center", ncols=min(4, len(groups)))
    else:
        figure.suptitle(groups[0].title)
    has_band = any(len(group.runs) > 1 for group in groups)
    figure.supxlabel("optimizer update" + has_band * " (band: smallest to largest of the seeds)", fontsize="medium")
    with rc_context({"axes.prop_cycle": f"cycler('color', {list(_COLORS)})"}):  # of C0, C1, ...
        figure.savefig(path, dpi=110, format="png")


def _draw(axes: Any, panel: Panel, groups: Sequence[Group]) -> None:
    from matplotlib.ticker import MaxNLocator

    shown = {}
    if panel is ACCURACY:
        _draw_accuracies(axes, groups)
    if panel.is_stacked:
        shown = _draw_bars(axes, panel, groups[0])
    for index, group in enumerate(groups if not panel.is_stacked else ()):
        for number, line in enumerate(panel.lines):
            curve = curve_of([run.logs.points(line.metric) for run in group.runs])
            if not len(curve.steps):
                continue
            color = f"C{number if len(groups) == 1 else index}"
            marker = "." if len(curve.steps) == 1 else None
            (shown[line.label],) = axes.plot(
                curve.steps, getattr(curve, line.over_seeds), color=color, linestyle=_STYLES[number], marker=marker
            )
            if number == 0 and len(group.runs) > 1:
                axes.fill_between(curve.steps, curve.low, curve.high, color=color, alpha=0.2, linewidth=0)
        target = group.runs[0].facts.get("target") if panel.has_target else None
        if target is not None:
            shown["target"] = axes.axhline(target, color=_GREY, linewidth=1, linestyle="-.")
    for name, value in panel.marks:
        mark = axes.axhline(value, color=_GREY, linewidth=1, linestyle=(0, (1, 4)))
        if name:
            shown[name] = mark
    if len(shown) > 1:
        entries = max(1, int(_WIDTH / (0.5 + 0.08 * max(map(len, shown)))))  # in a line
        below = {"loc": "upper left", "bbox_to_anchor": (0, -0.12), "borderaxespad": 0}  # where it covers no line
        legend = axes.legend(
            shown.values(), shown, fontsize="small", ncols=min(entries, len(shown)), frameon=False, **below
        )
        for handle in legend.legend_handles if len(groups) > 1 else ():
            handle.set_color(_GREY)
    if panel.is_log:
        axes.set_yscale("log")
    if panel.limits is not None:
        axes.set_ylim(*panel.limits)
    axes.set_title(panel.title, fontsize="medium", loc="left")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.grid(alpha=0.25)


def _draw_bars(axes: Any, panel: Panel, group: Group) -> dict[str, Any]:
    """Draw the lines of a group as bars, one on the other; return what a legend needs."""
    curves = {line.label: curve_of([run.logs.points(line.metric) for run in group.runs]) for line in panel.lines}
    shown: dict[str, Any] = {}
    bottom: Any = 0.0
    for number, (label, curve) in enumerate(curves.items()):
        if curve.mean.any():
            widths = np.diff(curve.steps, prepend=0)
            shown[label] = axes.bar(curve.steps, curve.mean, -widths, bottom, align="edge", color=f"C{number}")
            bottom = bottom + curve.mean
    return shown


def _draw_accuracies(axes: Any, groups: Sequence[Group]) -> None:
    """Draw evaluations as points with 95% intervals; of a single run, the first and the last with their values."""
    names = set()
    for index, group in enumerate(groups):
        for run in group.runs:
            steps, values = run.logs.accuracies(run.results)
            if len(steps):
                names.add(run.logs.accuracy_name(run.results).removeprefix("eval_"))
                axes.errorbar(steps, values[:, 0], 1.96 * values[:, 1], color=f"C{index}", marker="o", capsize=3)
            for place in {0, len(steps) - 1} if len(steps) and len(groups) == len(group.runs) == 1 else ():
                step, (mean, error) = steps[place], values[place]
                sign, side = (-1, "top") if mean + 1.96 * error > 0.9 else (1, "bottom")
                at, align = (step, mean + sign * 1.96 * error), "right" if step else "left"
                axes.annotate(f" {mean:.2f} ", at, ha=align, va=side, fontsize="small")
    axes.set_ylabel(", ".join(sorted(names)), fontsize="small")
    if all(name.startswith("avg@") for name in names):
        axes.set_ylim(top=1.03)


class Curve(NamedTuple):
    """The mean of some runs at each update that one of them logged, and its range."""

    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def curve_of(columns: Sequence[Points]) -> Curve:
    """Return mean and range of the runs that have a value at an update, by the points of each run."""
    steps = np.unique(np.concatenate([column.steps for column in columns]))
    table = np.full((len(columns), len(steps)), np.nan)
    for row, column in zip(table, columns, strict=True):
        row[np.searchsorted(steps, column.steps)] = column.values
    return Curve(steps, np.nanmean(table, 0), np.nanmin(table, 0), np.nanmax(table, 0))
