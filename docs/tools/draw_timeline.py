"""
Draw docs/timeline.png: when server and trainer work in three generation steps, with and without overlapped generation.

    python docs/tools/draw_timeline.py

A drawing, not a measurement: a generation and its training take equally long.
"""

from pathlib import Path

import matplotlib.pyplot as plt


PICTURE = Path(__file__).resolve().parents[1] / "timeline.png"
STEPS = 3
SENDING = 0.12  # of a generation
COLORS = {"generation": "#0072B2", "training": "#E69F00", "weights": "#555555"}  # told apart by colour-blind readers


def bars(overlaps: bool) -> list[tuple[str, str, float, float, str]]:
    """Return lane, kind, start, length and label of each bar."""
    found, now = [], 0.0
    if not overlaps:
        for step in range(STEPS):
            found.append(("server", "generation", now, 1.0, f"batch {step}"))
            found.append(("trainer", "training", now + 1, 1.0, f"batch {step}"))
            found.append(("trainer", "weights", now + 2, SENDING, ""))
            now += 2 + SENDING
        return found
    found.append(("server", "generation", 0.0, 1.0, "batch 0"))
    now = 1.0
    for step in range(STEPS):
        if step:
            found.append(("trainer", "weights", now, SENDING, ""))
            now += SENDING
        if step + 1 < STEPS:
            found.append(("server", "generation", now, 1.0, f"batch {step + 1}"))
        found.append(("trainer", "training", now, 1.0, f"batch {step}"))
        now += 1
    return found


def draw(path: Path) -> None:
    """Write the picture."""
    figure, axes = plt.subplots(2, 1, figsize=(9, 3.8), sharex=True, layout="constrained")
    titles = ("overlap_generation=False", "overlap_generation=True")
    for panel, title, overlaps in zip(axes, titles, (False, True), strict=True):
        for lane, kind, start, length, label in bars(overlaps):
            height = 0 if lane == "trainer" else 1
            panel.barh(height, length, left=start, height=0.7, color=COLORS[kind], edgecolor="white")
            panel.text(start + length / 2, height, label, ha="center", va="center", color="white", fontsize=10)
        panel.set_yticks([0, 1], ["trainer", "vLLM server"])
        panel.set_title(title, fontsize=10, family="monospace", loc="left")
        panel.spines[["top", "right", "left"]].set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    names = ["generation", "scoring, rewards, updates", "transfer of the weights"]
    place = {"loc": "lower right", "bbox_to_anchor": (1, 1.0), "frameon": False}
    axes[0].legend(handles, names, ncols=3, fontsize=9, **place)
    axes[1].set_xlabel("time (a generation = 1)")
    figure.savefig(path, dpi=110, facecolor="white")


if __name__ == "__main__":
    draw(PICTURE)
