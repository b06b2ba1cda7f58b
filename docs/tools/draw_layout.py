"""
Draw docs/layout.png: time of an update without padding and skipped samples, relative to `GRPOTrainer`'s.

    python docs/tools/draw_layout.py

From benchmarks/results/layout_cost.json. The floor is the time of the tokens that have a gradient, at the same speed.
"""

import json
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.common import RESULTS
from benchmarks.pictures import save_panel


PICTURE = Path(__file__).resolve().parents[1] / "layout.png"
TRL, OURS = "0.75", "#0072B2"  # of Okabe and Ito


def draw(path: Path) -> None:
    """Write the picture."""
    rows = json.loads((RESULTS / "layout_cost.json").read_text())["results"]
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(rows):
        ours = row["update"]["median"]
        axes.barh(place - 0.2, 1, 0.36, color=TRL, label="GRPOTrainer" if place == 0 else None)
        axes.barh(place + 0.2, ours, 0.36, color=OURS, label="BAPOTrainer" if place == 0 else None)
        axes.text(ours + 0.01, place + 0.2, f"{ours:.2f}", va="center", fontsize=12)
        axes.plot([ours / row["computed"]] * 2, [place, place + 0.4], color="black", linewidth=2)
    axes.plot([], [], color="black", linewidth=2, label="floor: tokens with a gradient")
    names = [
        "all of the same length",
        "mean length\na quarter of the limit",
        "the same, 45 % of groups\nwithout advantage",
    ]
    axes.set_yticks(range(len(rows)), names, fontsize=12)
    axes.invert_yaxis()
    figure.legend(fontsize=11, loc="outside lower center", ncols=3, frameon=False)
    save_panel(
        figure, axes, path, "CPU time of an update, relative to GRPOTrainer", "", "The same gradient in less time"
    )


if __name__ == "__main__":
    draw(PICTURE)
    print(f"Written: {PICTURE.name}")
