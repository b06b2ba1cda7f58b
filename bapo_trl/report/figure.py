"""The figure of the report: the panels that have data, side by side in a PNG."""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .logs import Logs, curve_of
from .panels import PANELS, Line, Panel
from .runs import Group


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#3b82f6", "#e4572e", "#2a9d5c", "#a46fd1", "#b8901c", "#1a9fb0", "#d6568c", "#888888")
"""Colors that are seen on white and on near black. With one group, of the lines of a panel; else, of the groups."""

STYLES = ("-", "--", ":")
"""Styles of the lines of a panel, where several groups have its colors."""

_GREY = "#8a8a8a"
_PLAIN_TEXT: dict[Any, Any] = {"text.parse_math": False}  # a `$` in the name of a run is a `$`


def drawn_panels(groups: Sequence[Group]) -> list[Panel]:
    """Return the panels for which some run has data."""
    return [panel for panel in PANELS if panel.drawn_lines(_logs(groups))]


def caption(groups: Sequence[Group]) -> str:
    """Return what is to be said of the lines, in a sentence or two."""
    band = (
        "Line: mean of the seeds that have a value at the update; band: from the smallest to the largest of them. The "
        "largest and the smallest ratio and the largest staleness are those of all seeds. "
    )
    has_band = any(len(group.runs) > 1 for group in groups)
    return f"{band * has_band}Grey: thresholds of the health lines, or what a value is measured against."


def save_png(groups: Sequence[Group], path: Path) -> None:
    """Draw all panels that have data, at least one, into one image."""
    from matplotlib import rc_context

    panels = drawn_panels(groups)
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    with rc_context(_PLAIN_TEXT):
        figure = _new_figure(4.2 * columns, 2.5 * rows + 0.5)
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        for panel, place in zip(panels, axes, strict=False):
            has_legend = _draw(place, panel, groups)
            place.set_title(panel.title, fontsize="medium", loc="left", pad=20 if has_legend else 6)
        for place in axes[len(panels) :]:
            place.set_axis_off()
        for place in axes[max(0, len(panels) - columns) : len(panels)]:
            place.set_xlabel("optimizer update", fontsize="small")
        if len(groups) > 1:
            handles = [_handle(color_of(index), "-", group.title) for index, group in enumerate(groups)]
            figure.legend(handles=handles, loc="outside upper center", ncols=min(4, len(groups)), fontsize="medium")
        else:
            figure.suptitle(groups[0].title, fontsize="large")
        figure.supxlabel(textwrap.fill(caption(groups), 60 * columns), fontsize="small", color=_GREY)
        figure.savefig(path, dpi=110, format="png")


def color_of(index: int) -> str:
    """Return the color of a group by its number."""
    return COLORS[index % len(COLORS)]


def _logs(groups: Sequence[Group]) -> list[Logs]:
    return [run.logs for group in groups for run in group.runs]


def _new_figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure  # not pyplot, which would choose a window and keep the figure

    return Figure(figsize=(width, height), layout="constrained")


def _draw(axes: "Axes", panel: Panel, groups: Sequence[Group]) -> bool:
    """Draw a panel without its title; return whether a legend stands where the title would be."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    lines = panel.drawn_lines(_logs(groups))
    is_alone = len(groups) == 1
    for value in panel.marks:
        axes.axhline(value, color=_GREY, linewidth=0.8, linestyle=(0, (1, 2)))
    for index, group in enumerate(groups):
        for number, line in enumerate(lines):
            color = color_of(number if is_alone else index)
            style = _style(line, number, is_alone)
            _draw_line(axes, line, group, color, style, width=1.4 if number == 0 else 1.0, has_band=number == 0)
    targets = [group.runs[0].facts.target for group in groups] if panel.has_target else []
    for index, target in enumerate(targets):
        if target is not None:
            axes.axhline(target, color=_GREY if is_alone else color_of(index), linewidth=1, linestyle="-.")
    handles = [
        _handle(color_of(number) if is_alone else _GREY, _style(line, number, is_alone), line.label)
        for number, line in enumerate(lines)
    ]
    if any(target is not None for target in targets):
        handles.append(_handle(_GREY, "-.", "target"))
    ends = [logs.steps[end] for logs in _logs(groups) for end in (0, -1)]
    if min(ends) < max(ends):
        axes.set_xlim(min(ends), max(ends))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.tick_params(labelsize="small")
    axes.grid(color=_GREY, alpha=0.2, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if panel.limits is not None:
        low, high = panel.limits
        axes.set_ylim(low if high is None else low - 0.03, None if high is None else high + 0.03)
    if panel.is_log:
        axes.set_yscale("log")
        bottom, top = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if top < 100 * bottom else (1.0,)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    if len(handles) > 1:  # above the axes, where no line runs through it
        axes.legend(
            handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(handles), fontsize="small",
            frameon=False, borderpad=0.2, handlelength=1.6, columnspacing=1.2, borderaxespad=0.2,
        )  # fmt: skip
    return len(handles) > 1


def _style(line: Line, number: int, is_alone: bool) -> Any:
    """Return the style of a panel's line; with one group, a maximum that equals the mean is not to hide it."""
    if is_alone:
        return "-" if line.over_seeds == "mean" else (0, (5, 4))
    return STYLES[number]


def _draw_line(axes: "Axes", line: Line, group: Group, color: str, style: Any, width: float, has_band: bool) -> None:
    """
    Draw the mean of the group's runs, of a maximum the largest, of a minimum the smallest.

    Undefined values leave a gap; updates without a generation do not, for what is measured at generations.
    """
    columns = [run.logs.logged(line.metric) for run in group.runs]
    curve = curve_of(columns)
    steps = curve.steps
    values = getattr(curve, line.over_seeds)
    axes.plot(steps, values, color=color, linestyle=style, linewidth=width)
    is_gap = np.isnan(np.concatenate([[math.nan], values, [math.nan]]))
    is_alone = ~is_gap[1:-1] & is_gap[:-2] & is_gap[2:]
    axes.plot(steps[is_alone], values[is_alone], color=color, marker=".", linestyle="none")
    if has_band and len(group.runs) > 1:
        axes.fill_between(steps, curve.low, curve.high, color=color, alpha=0.2, linewidth=0)


def _handle(color: str, style: Any, label: str):
    from matplotlib.lines import Line2D

    return Line2D([], [], color=color, linestyle=style, label=label)
