"""
Draw docs/timeline.png: when sampler and trainer work, in three ways to generate.

    python docs/tools/draw_timeline.py

A drawing, not a measurement: a generation with all its completions takes as long as training on it.
"""

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch


PICTURE = Path(__file__).resolve().parents[1] / "timeline.png"
STEPS = 3
SENDING = 0.12  # of a generation
SHORT, REST = 0.75, 0.4  # until enough completions have ended; what a long one lacks then
COLORS = {"generation": "#0072B2", "long": "#56B4E9", "training": "#E69F00", "weights": "#555555"}  # Okabe and Ito
SAMPLER, LONG, TRAINER = 2, 1, 0  # lanes, from the top
Bar = tuple[int, str, float, float, str]  # lane, kind, start, length, label


def synchronous() -> list[Bar]:
    """Return the bars of generation and training in turns."""
    bars, now = [], 0.0
    for step in range(STEPS):
        bars.append((SAMPLER, "generation", now, 1.0, f"batch {step}\nweights {step}"))
        bars.append((TRAINER, "training", now + 1, 1.0, f"batch {step}"))
        bars.append((TRAINER, "weights", now + 2, SENDING, ""))
        now += 2 + SENDING
    return bars


def overlapped() -> list[Bar]:
    """Return the bars of a generation during the training on the one before."""
    bars, now = [(SAMPLER, "generation", 0.0, 1.0, "batch 0\nweights 0")], 1.0
    for step in range(STEPS):
        if step:
            bars.append((TRAINER, "weights", now, SENDING, ""))
            now += SENDING
        if step + 1 < STEPS:
            bars.append((SAMPLER, "generation", now, 1.0, f"batch {step + 1}\nweights {step}"))
        bars.append((TRAINER, "training", now, 1.0, f"batch {step}"))
        now += 1
    return bars


def partial() -> list[Bar]:
    """Return the bars of generations that end before their long completions, one of which is shown."""
    bars, now = [], 0.0
    for step in range(STEPS):
        bars.append((SAMPLER, "generation", now, SHORT, f"batch {step}\nweights {step}"))
        if step < 2:
            bars.append((LONG, "long", now, (SHORT, REST)[step], ("begins", "ends")[step]))
        bars.append((TRAINER, "training", now + SHORT, 1.0, f"batch {step}"))
        bars.append((TRAINER, "weights", now + SHORT + 1, SENDING, ""))
        now += SHORT + 1 + SENDING
    return bars


def draw(path: Path) -> None:
    """Write the picture."""
    figure = Figure(figsize=(8, 6.6), layout="constrained")
    panels = figure.subplots(3, 1, sharex=True, height_ratios=(2, 2, 3))
    cases = {
        "Synchronous: sampler and trainer take turns": synchronous(),
        "Overlapped generation: batch n is sampled while batch n - 1 is trained": overlapped(),
        "Partial rollouts: a later policy continues long completions": partial(),
    }
    for panel, (title, bars) in zip(panels, cases.items(), strict=True):
        lanes = sorted({bar[0] for bar in bars})
        for lane, kind, start, length, label in bars:
            height = lanes.index(lane)
            panel.barh(height, length, left=start, height=0.78, color=COLORS[kind], edgecolor="white", linewidth=1.5)
            color = "black" if kind in ("training", "long") else "white"
            panel.text(start + length / 2, height, label, ha="center", va="center", color=color, fontsize=10)
        names = {SAMPLER: "sampler", LONG: "one long\ncompletion", TRAINER: "trainer"}
        panel.set_yticks(range(len(lanes)), [names[lane] for lane in lanes], fontsize=12)
        panel.tick_params(left=False, labelsize=12)
        panel.set_title(title, fontsize=12, loc="left", weight="bold")
        panel.spines[["top", "right", "left"]].set_visible(False)
    arrow = {"arrowstyle": "->", "linestyle": ":"}
    panels[2].annotate("", (SHORT + 1 + SENDING, LONG), (SHORT, LONG), arrowprops=arrow)
    panels[2].text(SHORT + (1 + SENDING) / 2, LONG + 0.12, "paused", ha="center", fontsize=10)
    names = ["generation", "one long completion", "rewards and updates", "weight transfer"]
    handles = [Patch(color=color, label=name) for color, name in zip(COLORS.values(), names, strict=True)]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=4, fontsize=10.5, frameon=False, columnspacing=1.2
    )
    panels[2].set_xlabel("time (1 = generation of all completions of a batch)", fontsize=12)
    figure.savefig(path, dpi=150, facecolor="white")


if __name__ == "__main__":
    draw(PICTURE)
    print(f"Written: {PICTURE.name}")
