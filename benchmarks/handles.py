"""
Which share of the gradient each handle can give to positive tokens: clip bounds and the weight of negative tokens.

    python -m benchmarks.handles

A calculation, not a training run: importance ratios are lognormal with a mean of 1, independent of the advantage, and
their spread stands for staleness. 35 % of the tokens have the advantage 1, the others -1.
"""

import argparse

import torch
from matplotlib.figure import Figure

from bapo_trl.clip_bounds import BoundGrid, contributions, search_bounds
from benchmarks.common import Section, provenance, save_result, table


TOKENS = 200_000
POSITIVE = 0.35
SPREADS = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
SMALLEST_WEIGHT = 0.05
TARGETS = (0.5, 0.7, 0.9)
FIGURE = "handles.png"


def measure(spread: float) -> dict:
    """Return the shares that can be reached with ratios of this standard deviation (of their logarithm)."""
    generator = torch.Generator().manual_seed(0)
    log_ratio = spread * torch.randn(TOKENS, generator=generator, dtype=torch.float64) - spread**2 / 2
    advantages = torch.where(torch.rand(TOKENS, generator=generator) < POSITIVE, 1.0, -1.0)
    grid = BoundGrid()
    curves = contributions(log_ratio.exp()[None], advantages[None], torch.ones(1, TOKENS), grid)

    def share(target: float, weight: float = 1.0):
        return search_bounds(curves, grid, target, negative_weight_min=weight)

    at_end = share(1.0)
    return {
        "spread": spread,
        "start": round(at_end.initial_positive_share.item(), 4),
        "bounds": round(at_end.positive_share.item(), 4),
        "weight": round(share(1.0, SMALLEST_WEIGHT).positive_share.item(), 4),
        "weights_for": {str(target): round(share(target, 1e-6).negative_weight.item(), 4) for target in TARGETS},
    }


def main():
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    settings = {"tokens": TOKENS, "positive": POSITIVE, "smallest_weight": SMALLEST_WEIGHT}
    save_result("handles", "cpu", settings, [measure(spread) for spread in SPREADS])


def render(content: dict) -> Section:
    """Return the section of a result."""
    settings, rows = content["settings"], content["results"]
    cells = [
        [
            f"{row['spread']:g}",
            f"{row['start']:.3f}",
            f"{row['bounds']:.3f}",
            f"{row['weight']:.3f}",
            *(f"{weight:.2f}" for weight in row["weights_for"].values()),
        ]
        for row in rows
    ]
    targets = rows[0]["weights_for"]
    text = [
        "## What each handle can move",
        f"Calculated for {settings['positive']:.0%} positive tokens, advantages of 1 and -1, and lognormal ratios. "
        "The spread is the standard deviation of the log-ratio: 0 on fresh samples, more on stale ones. The columns "
        "are the share of positive tokens in the gradient at the start bounds, at the end of both default ranges, and "
        f"there with the weight {settings['smallest_weight']} on negative tokens. Then the weight that each target "
        "takes.",
        table(
            [
                "Spread",
                "Start bounds",
                "Widest the search can do",
                f"With weight {settings['smallest_weight']}",
                *(f"Weight for {target}" for target in targets),
            ],
            cells,
        ),
        "At a ratio of 1 no bound moves the share. A weight moves it anywhere.",
        provenance(content),
    ]
    return Section("\n\n".join(text), figures={FIGURE: draw(rows, settings)})


def draw(rows: list[dict], settings: dict) -> Figure:
    """Return the figure of the shares within reach, over staleness."""
    figure = Figure(figsize=(7.5, 4.2), dpi=120, layout="constrained")
    panel = figure.subplots()
    spreads = [row["spread"] for row in rows]
    start, bounds, weight = ([row[key] for row in rows] for key in ("start", "bounds", "weight"))
    panel.fill_between(spreads, bounds, weight, color="tab:blue", alpha=0.15, label="reached by the weight")
    panel.fill_between(spreads, start, bounds, color="tab:orange", alpha=0.5, label="reached by the clip bounds")
    panel.plot(spreads, start, color="black", label="start bounds")
    panel.plot(spreads, bounds, color="tab:orange", label="end of both default ranges")
    panel.plot(spreads, weight, color="tab:blue", label=f"there, weight {settings['smallest_weight']}")
    panel.axhline(0.5, color="gray", linestyle=":", label="default target")
    panel.set_xlabel("spread of the log-ratio (staleness)")
    panel.set_ylabel("share of positive tokens in the gradient")
    panel.set_ylim(0, 1)
    panel.grid(alpha=0.3)
    panel.legend(fontsize="small", loc=(0.02, 0.53))
    return figure


if __name__ == "__main__":
    main()
