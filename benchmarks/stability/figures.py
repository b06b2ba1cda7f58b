"""The figures of the study. A line is the mean over the seeds, its band goes from the smallest to the largest."""

import statistics
from collections.abc import Iterable, Sequence

from matplotlib.figure import Figure


HARD_TASK = "running_totals"
"""The task of the figures."""

BINNED = ("grad_norm", "bapo/positive_share", "bapo/clip_low", "bapo/clip_high")
"""Metrics of updates that are drawn, each as its means over some bins of the run."""

ARM_COLORS = {"GRPO": "tab:blue", "clip-higher": "tab:orange", "BAPO": "tab:red"}
STALENESS_COLORS = {"1": "black", "4": "tab:blue", "16": "tab:orange", "64": "tab:red"}


def draw_staleness(rows: Sequence[dict]) -> Figure:
    """Draw the dynamics of GRPO by staleness."""
    lines = {
        f"{staleness} updates per generation": (select(rows, "GRPO", staleness), color)
        for staleness, color in STALENESS_COLORS.items()
    }
    figure = new_figure(15, 3.8)
    panels = figure.subplots(1, 4)
    draw_dynamics(panels, lines)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(lines))
    figure.suptitle("GRPO (bounds 0.8 to 1.2) by staleness")
    return figure


def draw_arms(rows: Sequence[dict]) -> Figure:
    """Draw GRPO, clip-higher and BAPO beside one another at 16 and at 64 updates per generation."""
    figure = new_figure(15, 7)
    panels = figure.subplots(2, 4)
    for row_of_panels, staleness in zip(panels, ("16", "64"), strict=True):
        lines = {arm: (select(rows, arm, staleness), color) for arm, color in ARM_COLORS.items()}
        draw_dynamics(row_of_panels, lines)
        row_of_panels[0].set_ylabel(f"{staleness} updates per generation")
    panels[0, 0].legend(fontsize="small")
    return figure


def draw_bounds(rows: Sequence[dict]) -> Figure:
    """Draw BAPO's bounds and positive share by staleness."""
    names = {
        "bapo/clip_high": "upper bound",
        "bapo/clip_low": "lower bound",
        "bapo/positive_share": "positive share, target 0.5",
    }
    figure = new_figure(13, 3.8)
    panels = figure.subplots(1, 3)
    for panel, (name, title) in zip(panels, names.items(), strict=True):
        for staleness, color in STALENESS_COLORS.items():
            draw_line(panel, metric_curves(select(rows, "BAPO", staleness), name), f"{staleness}", color)
        panel.set_title(title)
        panel.set_xlabel("updates")
        panel.grid(alpha=0.3)
    draw_line(panels[2], metric_curves(select(rows, "GRPO", "64"), "bapo/positive_share"), "64, GRPO", "gray")
    panels[2].axhline(0.5, color="black", linewidth=0.8, linestyle="--")
    panels[2].legend(fontsize="small", title="updates per generation", loc="lower right")
    return figure


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches."""
    return Figure(figsize=(width, height), dpi=110, layout="constrained")


def is_drawn(purpose: str, task: str, arm: str, staleness: str) -> bool:
    """Return whether a figure draws these runs."""
    return purpose == "reported" and task == HARD_TASK and arm in ARM_COLORS and staleness in STALENESS_COLORS


def has_ranges(purpose: str, arm: str, staleness: str) -> bool:
    """Return whether the ranges of metrics in docs/metrics.md may be of these runs."""
    return purpose != "candidate" and arm == "BAPO" and staleness in STALENESS_COLORS


def select(rows: Sequence[dict], arm: str, staleness: str) -> list[dict]:
    """Return the rows of an arm at a staleness setting."""
    return [row for row in rows if row["arm"] == arm and row["staleness_setting"] == staleness]


def draw_dynamics(panels: Iterable, lines: dict[str, tuple[list[dict], str]]) -> None:
    """Draw accuracy, entropy, gradient norm and positive share of some groups of runs, a panel each."""
    for panel, (title, curves) in zip(
        panels,
        {
            "held-out accuracy": lambda runs: held_out_curves(runs, 1),
            "entropy of sampled completions (nats)": lambda runs: held_out_curves(runs, 3),
            "gradient norm": lambda runs: metric_curves(runs, "grad_norm"),
            "positive share": lambda runs: metric_curves(runs, "bapo/positive_share"),
        }.items(),
        strict=True,
    ):
        for label, (runs, color) in lines.items():
            draw_line(panel, curves(runs), label, color)
        panel.set_title(title)
        panel.set_xlabel("updates")
        panel.grid(alpha=0.3)


def held_out_curves(runs: Sequence[dict], column: int) -> tuple[list[float], list[list[float]]]:
    """Return the updates of the held-out measurements, and a column of them for each run."""
    updates = [point[0] for point in runs[0]["held_out"]] if runs else []
    return updates, [[point[column] for point in run["held_out"]] for run in runs]


def metric_curves(runs: Sequence[dict], name: str) -> tuple[list[float], list[list[float]]]:
    """Return the middles of the bins of a run, and a metric's means over them for each run."""
    curves = [run["bins"][name] for run in runs]
    if not curves:
        return [], []
    length = runs[0]["held_out"][-1][0] / len(curves[0])
    return [(index + 0.5) * length for index in range(len(curves[0]))], curves


def draw_line(panel, points: tuple[list[float], list[list[float]]], label: str, color: str) -> None:
    """Draw the mean of some curves, and a band from the lowest to the highest."""
    updates, curves = points
    columns = [[value for value in column if value is not None] for column in zip(*curves, strict=True)]
    drawn = [(update, column) for update, column in zip(updates, columns, strict=True) if column]
    if not drawn:
        return
    updates, columns = zip(*drawn, strict=True)
    panel.plot(updates, [statistics.mean(column) for column in columns], color=color, label=label)
    panel.fill_between(updates, list(map(min, columns)), list(map(max, columns)), color=color, alpha=0.15, linewidth=0)
