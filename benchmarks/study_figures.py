"""
Draw figures of docs/results.md and of the reports from the runs in `benchmarks/results/`.

    python -m benchmarks.study_figures  # into docs/, and methods_study.png into reports/
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from textwrap import fill

import numpy as np

from bapo_trl.compare.figure import save_figure
from bapo_trl.compare.results import Row
from bapo_trl.compare.statistics import differences, mean_over_seeds
from bapo_trl.compare.tables import compare
from benchmarks.common import ROOT, rows
from benchmarks.few_positive import APART, ARMS, by_setting, complete
from benchmarks.pages import AGAINST, CHAT_NAMES, STALE, TASK, UPDATES, Finals, chat_settings
from benchmarks.time_to_accuracy import draw_courses


METHODS = ("GRPO", "clip-higher", "BAPO")
# Methods of the studies of time, and what they are called in the figure
AT_EQUAL_TIME = {"TRL, 5e-4": "GRPOTrainer, 64 updates", "recommendation": "our set-up, 192 updates"}
OVER_A_SERVER = {
    "TRL, 5e-4": "GRPOTrainer",
    "GRPO, 1": "ours, 1 update per generation",
    "VESPO, 16": "VESPO, 16 updates per generation",
    "recommendation": "and overlap, 2 passes, vLLM's logps",
}
OF_THE_CHAT_MODEL = {
    "TRL": "GRPOTrainer",
    "GRPO, 1": "ours, 1 update per generation",
    "VESPO, 16": "VESPO, 16 updates per generation",
    "recommendation": "and zero-advantage groups replaced",
}


def draw_methods(path: Path) -> None:
    """Draw the accuracy of three methods on running totals over the updates, with a panel for each staleness."""
    runs = [row for name in STALE for row in rows("stability", **{TASK: "running totals", UPDATES: name})]
    save_figure(compare([row for row in runs if row.arm in METHODS], METHODS, "BAPO"), path)


def draw_differences(panels: Mapping[str, Finals], path: Path) -> None:
    """Draw a panel for each setting: the difference from VESPO of each seed, and their mean with its interval."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    arms = [arm for arm in dict.fromkeys(arm for task in panels.values() for arm in task) if arm != AGAINST]
    figure = Figure(figsize=(6.8, 1.2 + 0.5 * len(arms)), layout="constrained")  # for a phone, too
    every_axes = figure.subplots(1, len(panels), squeeze=False, sharex=True, sharey=True)[0]
    for axes, (title, task) in zip(every_axes, panels.items(), strict=True):
        for found in differences(task, [(arm, AGAINST) for arm in arms if arm in task]):
            place = len(arms) - arms.index(found.arm)
            axes.plot(found.values, [place] * len(found.values), "o", color="0.7", markersize=4)
            axes.errorbar(found.mean.value, place, xerr=found.mean.half_width, fmt="D", color="C0", capsize=3)
        axes.axvline(0, color="0.3", linewidth=1)
        axes.set_title(title.replace(", ", ",\n").replace(" per ", "\nper "), loc="left")
        axes.set_yticks(range(len(arms), 0, -1))
        axes.set_yticklabels([fill(CHAT_NAMES.get(arm, arm).replace("`", ""), 22) for arm in arms])
        axes.xaxis.set_major_locator(MaxNLocator(3))
        axes.grid(axis="x", alpha=0.25)
    figure.supxlabel(f"difference in final accuracy from {AGAINST}, after 64 updates", fontsize=10)
    figure.savefig(path, dpi=150)


def draw_contributions(runs: Iterable[Row], path: Path) -> None:
    """Draw final accuracy over positive contribution at the start: a panel for each staleness, a line per method."""
    from matplotlib.figure import Figure

    settings = by_setting(runs)
    stalenesses = sorted({updates for updates, _ in settings})
    figure = Figure(figsize=(3.4 * len(stalenesses), 4.4), layout="constrained")
    every_axes = figure.subplots(1, len(stalenesses), squeeze=False, sharey=True)[0]
    for axes, updates in zip(every_axes, stalenesses, strict=True):
        places = sorted(contribution for each, contribution in settings if each == updates)
        for arm in (arm for arm in ARMS if arm in settings[updates, places[0]]):
            found = {place: mean_over_seeds(list(settings[updates, place][arm].values())) for place in places}
            values, widths = (np.array([getattr(m, name) for m in found.values()]) for name in ("value", "half_width"))
            (line,) = axes.plot(list(found), values, "o--" if arm == APART else "o-", label=arm, markersize=4)
            axes.fill_between(list(found), values - widths, values + widths, alpha=0.08, color=line.get_color())
        axes.set(xlabel="positive contribution at the start", xticks=places)
        axes.set_title(f"{updates} updates per generation,\nafter 256 updates", fontsize=11, loc="left")
        axes.grid(alpha=0.25)
    every_axes[0].set_ylabel("final accuracy (band: 95 % interval)")
    figure.legend(*every_axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    draw_differences(chat_settings(), ROOT / "docs" / "chat_study.png")
    draw_methods(ROOT / "benchmarks" / "reports" / "methods_study.png")
    draw_contributions(complete(rows("regime")), ROOT / "docs" / "regime_study.png")
    draw_courses("time_server_longer", AT_EQUAL_TIME, ROOT / "docs" / "time.png")
    draw_courses("time_server", OVER_A_SERVER, ROOT / "benchmarks" / "reports" / "time_server.png")
    draw_courses("time_chat", OF_THE_CHAT_MODEL, ROOT / "benchmarks" / "reports" / "time_chat.png")


if __name__ == "__main__":
    main()
