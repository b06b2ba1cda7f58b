"""The figure of the report: the panels that have data, side by side in a PNG."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .health import CUT_OFF_MAX, NO_SIGNAL_MAX, RATIO_MEAN_MAX, RATIO_MEAN_MIN
from .runs import Group, Points


class Line(NamedTuple):
    """A metric in a panel."""

    metric: str
    label: str
    over_seeds: str = "mean"  # part of the `Curve` of several seeds; a maximum is the "high", a minimum the "low" one


class Panel(NamedTuple):
    """A panel, whose first line is drawn with a band."""

    title: str
    lines: tuple[Line, ...]
    marks: tuple[float, ...] = ()  # grey lines
    limits: tuple[float, float | None] | None = None  # of the axis; open above for `None`
    is_log: bool = False
    has_target: bool = False  # a line for each group that has a target


_SHARE = (-0.03, 1.03)
_GREY = "0.5"
_STYLES = ("-", "--", ":")  # of the lines of a panel

PANELS = (
    Panel("Mean reward of the samples", (Line("reward", "reward"),)),
    Panel(
        "Length of the completions (tokens)",
        (Line("completions/mean_length", "mean"), Line("completions/max_length", "longest of a generation")),
    ),
    Panel(
        "Completions cut off, and without signal (share)",
        (Line("completions/clipped_ratio", "cut off"), Line("frac_reward_zero_std", "without signal")),
        marks=(CUT_OFF_MAX, NO_SIGNAL_MAX),
        limits=_SHARE,
    ),
    Panel("Entropy of the policy (nats per token)", (Line("entropy", "entropy"),)),
    Panel(
        "Share of positive-advantage tokens in the loss",
        (Line("bapo/positive_share", "as trained"), Line("bapo/positive_share_initial", "unadjusted")),
        limits=_SHARE,
        has_target=True,
    ),
    Panel(
        "Clip bounds (importance ratio)",
        (Line("bapo/clip_high", "upper bound"), Line("bapo/clip_low", "lower bound")),
        marks=(1.0,),
    ),
    Panel(
        "Importance ratios",
        (
            Line("ratio/mean", "mean"),
            Line("ratio/max", "largest", over_seeds="high"),
            Line("ratio/min", "smallest", over_seeds="low"),
        ),
        marks=(RATIO_MEAN_MIN, RATIO_MEAN_MAX),
        is_log=True,
    ),
    Panel(
        "Staleness of the samples (policy versions)",
        (Line("staleness/mean", "mean"), Line("staleness/max", "largest", over_seeds="high")),
        limits=(0.0, None),
    ),
    Panel(  # of the asynchronous trainer
        "Staleness of the samples (transfers of the weights)",
        (Line("sample/staleness_mean", "mean"), Line("sample/staleness_max", "largest", over_seeds="high")),
        limits=(0.0, None),
    ),
)
"""All panels, in their order."""


def drawn_panels(groups: Sequence[Group]) -> list[Panel]:
    """Return the panels for which some run has data."""
    logs = [run.logs for group in groups for run in group.runs]
    return [
        panel for panel in PANELS if any(len(each.points(line.metric).steps) for each in logs for line in panel.lines)
    ]


def save_png(groups: Sequence[Group], path: Path) -> None:
    """Draw all panels that have data, at least one, into one image."""
    from matplotlib.figure import Figure  # not pyplot, which would choose a window and keep the figure
    from matplotlib.lines import Line2D

    panels = drawn_panels(groups)
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.2 * columns, 2.5 * rows + 0.5), layout="constrained")
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
    figure.supxlabel("optimizer update" + has_band * " (band: smallest to largest of the seeds)", fontsize="small")
    figure.savefig(path, dpi=110, format="png")


def _draw(axes: Any, panel: Panel, groups: Sequence[Group]) -> None:
    from matplotlib.ticker import MaxNLocator

    shown = {}
    for value in panel.marks:
        axes.axhline(value, color=_GREY, linewidth=0.8, linestyle=":")
    for index, group in enumerate(groups):
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
    if len(shown) > 1:
        legend = axes.legend(shown.values(), shown, fontsize="small", framealpha=0.5)
        for handle in legend.legend_handles if len(groups) > 1 else ():
            handle.set_color(_GREY)
    if panel.is_log:
        axes.set_yscale("log")
    if panel.limits is not None:
        axes.set_ylim(*panel.limits)
    axes.set_title(panel.title, fontsize="medium", loc="left")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.grid(alpha=0.25)


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
