"""
Draw docs/losses.png: the final accuracy of each method over the updates per generation.

    python docs/tools/draw_losses.py

The runs are those of running totals in benchmarks/results.
"""

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from bapo_trl.compare.statistics import Mean, mean_over_seeds
from benchmarks.pages import TASK, UPDATES, finals, rows
from benchmarks.pictures import save_panel


PICTURE = Path(__file__).resolve().parents[1] / "losses.png"
POINTS = (1, 4, 16, 64)
# Color, by Okabe and Ito, marker, line, and height of the name beside the last point
STYLES = {
    "GRPO": ("#000000", "o", "-", 0.415),
    "clip-higher": ("#808080", "s", "-", 0.475),
    "CISPO": ("#CC79A7", "^", "-", 0.642),
    "BAPO": ("#D55E00", "D", "-", 0.762),
    "SAPO": ("#E69F00", "v", "-", 0.815),
    "GSPO": ("#009E73", "P", "-", 0.905),
    "VESPO": ("#0072B2", "o", "-", 0.955),
    "VESPO, constant weight 0.5": ("#56B4E9", "X", "--", 1.005),
}
NAMES = {"VESPO, constant weight 0.5": "VESPO, half the weight"}
THICK = ("BAPO", "VESPO")
NOTE = (
    "Bars: 95 % confidence intervals, 3 to 5 seeds.\n"
    "Task: running totals of seven digits.\n"
    "Model: tiny, trained from scratch."
)
APART = 0.016  # how far neighbouring methods stand apart, in parts of the updates per generation


def accuracies() -> dict[str, dict[int, Mean]]:
    """Return the mean final accuracy of each method, by updates per generation."""
    found: dict[str, dict[int, Mean]] = {arm: {} for arm in STYLES}
    for updates in POINTS:
        sweep = {TASK: "running totals", UPDATES: str(updates)}
        by_arm = finals([*rows("balance", **sweep), *rows("stability", **sweep)])
        for arm in STYLES:
            if arm in by_arm:
                found[arm][updates] = mean_over_seeds(list(by_arm[arm].values()))
    return found


def draw(path: Path) -> None:
    """Write the picture."""
    figure = Figure(figsize=(8, 4.9), layout="constrained")
    axes = figure.subplots()
    for place, (arm, means) in enumerate(accuracies().items()):
        color, marker, line, height = STYLES[arm]
        axes.errorbar(
            [updates * (1 + APART * (2 * place - len(STYLES) + 1)) for updates in means],
            [mean.value for mean in means.values()],
            yerr=[mean.half_width for mean in means.values()],
            color=color, marker=marker, linestyle=line, linewidth=3 if arm in THICK else 1.7, markersize=6,
            elinewidth=1.4, capsize=3.5, zorder=3 if arm in THICK else 2,
        )  # fmt: skip
        axes.plot(78, height, marker, color=color, markersize=8, clip_on=False)
        axes.text(85, height, NAMES.get(arm, arm), fontsize=12, va="center", weight="bold" if arm in THICK else None)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(POINTS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(POINTS, [str(updates) for updates in POINTS])
    axes.set(xlim=(0.78, 75), ylim=(0.35, 1.03))
    axes.text(0.02, 0.04, NOTE, transform=axes.transAxes, fontsize=11, color="0.25", linespacing=1.4)
    title = "The more updates per generation, the more the loss matters"
    save_panel(figure, axes, path, "updates per generation (log scale)", "final accuracy", title, pad=12)


if __name__ == "__main__":
    draw(PICTURE)
    print(f"Written: {PICTURE.name}")
