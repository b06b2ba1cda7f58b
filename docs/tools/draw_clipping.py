"""
Draw docs/clipping.png: the clipped objective of one token, and the ranges in which the search moves its bounds.

    python docs/tools/draw_clipping.py

The ranges are the defaults of `BAPOConfig`.
"""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from bapo_trl.clip_bounds.config import BoundSearchConfig


PICTURE = Path(__file__).resolve().parents[1] / "clipping.png"
START, MOVED, RANGE = "#000000", "#D55E00", "#E69F00"  # of Okabe and Ito


def draw(path: Path) -> None:
    """Write the picture."""
    grid = BoundSearchConfig().bound_grid
    upper, lower = (grid.upper_start, grid.upper_max), (grid.lower_start, grid.lower_max)
    ratio = np.linspace(0, 3.4, 341)
    more, fewer = (
        "search raises\nthe bound:\nmore tokens\ncontribute",
        "search raises the bound:\nfewer tokens contribute",
    )
    panels = {
        "Positive advantage: upper bound": (upper, 1, np.minimum, (1.32, 0.2, more)),
        "Negative advantage: lower bound": (lower, -1, np.maximum, (1.05, -0.75, fewer)),
    }
    figure = Figure(figsize=(8, 4.4), layout="constrained")
    both = zip(figure.subplots(1, 2), panels.items(), strict=True)
    for axes, (title, ((start, most), sign, clip, text)) in both:
        axes.axvspan(start, most, color=RANGE, alpha=0.25, linewidth=0, label="range of the search")
        axes.plot(
            ratio,
            sign * clip(ratio, most),
            color=MOVED,
            linewidth=2.5,
            linestyle="--",
            label=f"clipped at {most:.1f} (end)",
        )
        axes.plot(
            ratio, sign * clip(ratio, start), color=START, linewidth=2.5, label=f"clipped at {start:.1f} (start)"
        )
        axes.axvline(1, color="0.5", linewidth=1, linestyle=":")
        axes.text(*text, fontsize=11, linespacing=1.3)
        axes.set_title(title, fontsize=13)
        axes.set_xlabel("importance ratio r", fontsize=12)
        axes.tick_params(labelsize=11)
        axes.set_xlim(0, 3.4)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=10.5, loc="upper left" if sign > 0 else "upper right")
        axes.spines[["top", "right"]].set_visible(False)
    left, right = figure.axes
    left.set_ylabel("objective of a token / |advantage|", fontsize=12)
    left.set_ylim(0, 4.3)
    right.set_xlim(0, 2)
    right.set_ylim(-2, 0)
    figure.suptitle("A token contributes to the gradient where its line is not flat", fontsize=14)
    figure.savefig(path, dpi=150, facecolor="white")


if __name__ == "__main__":
    draw(PICTURE)
    print(f"Written: {PICTURE.name}")
