"""
Draw the differences in final accuracy from VESPO of the chat study, in the settings whose runs are complete.

    python -m benchmarks.chat_figure  # writes docs/chat_study.png
"""

from collections.abc import Mapping
from pathlib import Path

from bapo_trl.compare.statistics import differences
from benchmarks.common import ROOT
from benchmarks.pages import AGAINST, CHAT_NAMES, OTHERS, Finals, chat_settings


FIGURE = ROOT / "docs" / "chat_study.png"


def draw(panels: Mapping[str, Finals], path: Path) -> None:
    """Draw a panel for each setting: the difference from VESPO of each seed, and their mean with its interval."""
    from matplotlib.figure import Figure

    arms = [arm for arm in dict.fromkeys(arm for task in panels.values() for arm in task) if arm != AGAINST]
    figure = Figure(figsize=(1.8 + 3.4 * len(panels), 0.9 + 0.42 * len(arms)), layout="constrained")
    every_axes = figure.subplots(1, len(panels), squeeze=False, sharex=True, sharey=True)[0]
    for axes, (title, task) in zip(every_axes, panels.items(), strict=True):
        for found in differences(task, [(arm, AGAINST) for arm in arms if arm in task], OTHERS):
            place = len(arms) - arms.index(found.arm)
            axes.plot(found.values, [place] * len(found.values), "o", color="0.7", markersize=4)
            axes.errorbar(found.mean.value, place, xerr=found.mean.half_width, fmt="D", color="C0", capsize=3)
        axes.axvline(0, color="0.3", linewidth=1)
        axes.set(
            title=f"{title.replace(', ', chr(10))} per generation",
            xlabel=f"difference in final accuracy from {AGAINST}",
            yticks=range(len(arms), 0, -1),
        )
        axes.set_yticklabels([CHAT_NAMES.get(arm, arm).replace("`", "") for arm in arms])
        axes.grid(axis="x", alpha=0.25)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    draw(chat_settings(), FIGURE)
    print(f"Written: {FIGURE.relative_to(ROOT)}")
