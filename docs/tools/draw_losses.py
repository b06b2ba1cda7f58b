"""
Draw docs/losses.png: the accuracy of each method after 64 updates, over the updates per generation, and after 128
updates with 64 per generation.

    python docs/tools/draw_losses.py

The runs are those of running totals in benchmarks/results. Runs with 64 updates per generation took 128 updates. Of
three methods, the accuracy was measured after 64 of them, too.
"""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from bapo_trl.compare.results import Row
from bapo_trl.compare.statistics import Mean, mean_over_seeds
from benchmarks.pages import TASK, UPDATES, rows
from benchmarks.pictures import style_panel


PICTURE = Path(__file__).resolve().parents[1] / "losses.png"
POINTS = (1, 4, 16, 64)
EQUAL_UPDATES, ALL_UPDATES = 64, 128
# Color, by Okabe and Ito, marker, line, and height of the name beside the last panel
STYLES = {
    "GRPO": ("#000000", "o", "-", 0.405),
    "clip-higher": ("#808080", "s", "-", 0.472),
    "CISPO": ("#CC79A7", "^", "-", 0.642),
    "BAPO": ("#D55E00", "D", "-", 0.755),
    "SAPO": ("#E69F00", "v", "-", 0.818),
    "GSPO": ("#009E73", "P", "-", 0.895),
    "VESPO": ("#0072B2", "o", "-", 0.953),
    "VESPO, constant weight 0.5": ("#56B4E9", "X", "--", 1.012),
}
NAMES = {"VESPO, constant weight 0.5": "VESPO, half the weight"}
THICK = ("BAPO", "VESPO")
NOTE = (
    "Bars: 95 % confidence intervals, 3 to 5 seeds.\n"
    "Task: running totals of seven digits.\n"
    "Model: tiny, trained from scratch."
)
APART = 0.016  # how far neighbouring methods stand apart, in parts of the updates per generation


def accuracies(updates: int) -> dict[str, dict[int, Mean]]:
    """Return the mean accuracy of each method after so many updates, by updates per generation."""
    found: dict[str, dict[int, Mean]] = {arm: {} for arm in STYLES}
    for per_generation in POINTS:
        sweep = {TASK: "running totals", UPDATES: str(per_generation)}
        by_run = {(row.arm, row.seed): row for row in (*rows("balance", **sweep), *rows("stability", **sweep))}
        for arm in STYLES:
            of_arm = [_accuracy(row, updates) for row in by_run.values() if row.arm == arm]
            measured = [accuracy for accuracy in of_arm if accuracy is not None]
            if measured:
                found[arm][per_generation] = mean_over_seeds(measured)
    return found


def _accuracy(row: Row, updates: int) -> float | None:
    """Return the accuracy of a run after so many updates, or `None` if it was not measured."""
    length = ALL_UPDATES if row.sweep[UPDATES] == "64" else EQUAL_UPDATES
    return row.final if updates == length else dict(row.curve or ()).get(updates)


def draw(path: Path) -> None:
    """Write the picture."""
    figure = Figure(figsize=(10, 4.9), layout="constrained")
    equal, longer = figure.subplots(1, 2, sharey=True, width_ratios=[2.4, 1])
    _plot(equal, accuracies(EQUAL_UPDATES))
    _plot(longer, {arm: {64: means[64]} for arm, means in accuracies(ALL_UPDATES).items()})
    for place, (arm, (color, marker, _, height)) in enumerate(STYLES.items()):
        longer.plot(80, height, marker, color=color, markersize=8, clip_on=False, zorder=place)
        longer.text(83, height, NAMES.get(arm, arm), fontsize=12, va="center", weight=_weight(arm))
    equal.set_xscale("log")
    for axes, points, limits in ((equal, POINTS, (0.78, 80)), (longer, (64,), (50, 78))):
        axes.xaxis.set_major_locator(FixedLocator(points))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticks(points, [str(each) for each in points])
        axes.set(xlim=limits, ylim=(0.2, 1.03))
    equal.text(0.02, 0.04, NOTE, transform=equal.transAxes, fontsize=11, color="0.25", linespacing=1.4)
    name = "updates per generation"
    style_panel(equal, f"{name} (log scale)", "accuracy", f"All runs after {EQUAL_UPDATES} updates", pad=12)
    style_panel(longer, name, "", f"After {ALL_UPDATES} updates", pad=12)
    figure.savefig(path, dpi=150, facecolor="white")


def _plot(axes, by_arm: Mapping[str, Mapping[int, Mean]]) -> None:
    for place, (arm, means) in enumerate(by_arm.items()):
        color, marker, line, _ = STYLES[arm]
        axes.errorbar(
            [updates * (1 + APART * (2 * place - len(STYLES) + 1)) for updates in means],
            [mean.value for mean in means.values()],
            yerr=[mean.half_width for mean in means.values()],
            color=color, marker=marker, linestyle=line, linewidth=3 if arm in THICK else 1.7, markersize=6,
            elinewidth=1.4, capsize=3.5, zorder=3 if arm in THICK else 2,
        )  # fmt: skip


def _weight(arm: str) -> str | None:
    return "bold" if arm in THICK else None


if __name__ == "__main__":
    draw(PICTURE)
    print(f"Written: {PICTURE.name}")
