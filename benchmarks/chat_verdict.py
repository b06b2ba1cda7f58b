"""
Say what the chat study's rules make of its runs, and draw how far its arms end above VESPO.

    python -m benchmarks.chat_verdict  # prints the verdict; writes docs/chat_study.png

Without all tasks and seeds there is no verdict: the figure shows what there is.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from bapo_trl.compare.statistics import differences
from benchmarks.chat_rules import AGAINST, OTHERS, TASKS, Task, best_arm, cap_stays, differing
from benchmarks.common import ROOT
from benchmarks.pages import chat_settings, chat_tasks


FIGURE = ROOT / "docs" / "chat_study.png"


def verdict() -> Iterator[str]:
    """
    Yield what the rules say, a line each.

    Raises:
        ValueError: If a task or a seed is missing. By rule 6 a task may be run at 16 alone: then none is named at 4.
    """
    for updates in (4, 16):
        found = chat_tasks(updates)
        for name, task in found.items():
            yield f"{name} at {updates}: differ from {AGAINST}: {', '.join(differing(task)) or 'none'}"
        best = best_arm(list(found.values())) if updates == 16 or len(found) == TASKS else None
        yield f"at {updates}, above {AGAINST} on both tasks: {best or 'none'}"
    yield f"negative_ratio_cap: {'stays' if cap_stays(list(chat_tasks(16).values())) else 'goes'}"


def draw(panels: Mapping[str, Task], path: Path) -> None:
    """Draw a panel for each task: the differences to VESPO, of each seed, and their mean with its interval."""
    from matplotlib.figure import Figure

    arms = [arm for arm in dict.fromkeys(arm for task in panels.values() for arm in task) if arm != AGAINST]
    figure = Figure(figsize=(1.8 + 3.4 * len(panels), 0.6 + 0.42 * len(arms)), layout="constrained")
    every_axes = figure.subplots(1, len(panels), squeeze=False, sharex=True, sharey=True)[0]
    for axes, (title, task) in zip(every_axes, panels.items(), strict=True):
        for found in differences(task, [(arm, AGAINST) for arm in arms if arm in task], OTHERS):
            place = len(arms) - arms.index(found.arm)
            axes.plot(found.values, [place] * len(found.values), "o", color="0.7", markersize=4)
            axes.errorbar(found.mean.value, place, xerr=found.mean.half_width, fmt="D", color="C0", capsize=3)
        axes.axvline(0, color="0.3", linewidth=1)
        axes.set(title=title, xlabel=f"final accuracy above {AGAINST}", yticks=range(len(arms), 0, -1))
        axes.set_yticklabels(arms)
        axes.grid(axis="x", alpha=0.25)
    figure.savefig(path, dpi=110)


def main() -> None:
    draw(chat_settings(), FIGURE)
    print(f"Written: {FIGURE.relative_to(ROOT)}")
    try:
        print("\n".join(verdict()))
    except ValueError as error:
        raise SystemExit(f"No verdict: {error}") from error


if __name__ == "__main__":
    main()
