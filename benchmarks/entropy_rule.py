"""
The Entropy-Clip Rule against what happens: does the covariance of an update tell how the entropy moves?

    python -m benchmarks.entropy_rule --jobs 2

The paper's Eq. 6-7: the entropy falls by the covariance of log-probability and advantage over the tokens that pass a
gradient, times a learning rate. `bapo/entropy_covariance` is that covariance. Here its sum over the updates of a
generation is set against the change of the entropy from that generation's samples to the next one's, under GRPO's
bounds, BAPO's, and with the weight of negative tokens.
"""

import argparse
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.common import ROOT, Section, provenance, save_result, table
from benchmarks.run_pool import run_all
from benchmarks.training_run import TASK_SETTINGS, fixed_clip


TASK, GENERATIONS, SEEDS, LEARNING_RATE = "sums", 16, (0, 1, 2), 5e-4
ARMS = {
    "GRPO": fixed_clip(0.8, 1.2),
    "BAPO": {},
    "weight, share 0.7": {
        **fixed_clip(0.6, 3.0),
        "positive_contribution_target": 0.7,
        "negative_weight_min": 0.05,
        "negative_ratio_cap": 3.0,
    },
}
FIGURE = "entropy_rule.png"


def changes(result: dict) -> tuple[list[float], list[float]]:
    """Return minus the sum of the covariances, and the change of the entropy, from each generation to the next."""
    updates = TASK_SETTINGS[TASK]["steps_per_generation"]
    entropy, covariance = (result["series"][name] for name in ("entropy", "bapo/entropy_covariance"))
    predicted = [
        -sum(value or 0.0 for value in covariance[first : first + updates])
        for first in range(0, len(covariance), updates)
    ]
    fresh = entropy[::updates]  # of the policy that sampled, on its samples
    return predicted[:-1], [after - before for before, after in itertools.pairwise(fresh)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--finished", type=Path, default=ROOT / "outputs" / "entropy_rule.jsonl", help="finished runs")
    arguments = parser.parse_args()
    named = {
        (arm, seed): {
            "seed": seed,
            "generations": GENERATIONS,
            "task": TASK,
            "held_out_every": GENERATIONS * TASK_SETTINGS[TASK]["steps_per_generation"],
            "args": {**args, "learning_rate": LEARNING_RATE},
        }
        for seed in SEEDS
        for arm, args in ARMS.items()
    }
    results = run_all(list(named.values()), arguments.finished, arguments.jobs)
    rows = []
    for (arm, seed), result in zip(named, results, strict=True):
        predicted, observed = changes(result)
        rows.append(
            {
                "arm": arm,
                "seed": seed,
                "predicted": [round(value, 5) for value in predicted],
                "observed": [round(value, 5) for value in observed],
            }
        )
    save_result("entropy_rule", "cpu", {"threads": 1, "generations": GENERATIONS, "lr": LEARNING_RATE}, rows)


def summarize(rows: Sequence[dict]) -> list[dict]:
    """Return for each arm the correlation of prediction and observation over all generations of all seeds."""
    summary = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        of_arm = [row for row in rows if row["arm"] == arm]
        predicted = [value for row in of_arm for value in row["predicted"]]
        observed = [value for row in of_arm for value in row["observed"]]
        summary.append(
            {
                "arm": arm,
                "points": len(predicted),
                "correlation": statistics.correlation(predicted, observed),
                "slope": statistics.linear_regression(predicted, observed).slope,
                "same_sign": statistics.mean((p > 0) == (o > 0) for p, o in zip(predicted, observed, strict=True)),
                "predicted": sum(predicted) / len(of_arm),
                "observed": sum(observed) / len(of_arm),
            }
        )
    return summary


def render(content: dict) -> Section:
    """Return the section of a result."""
    settings, rows = content["settings"], content["results"]
    cells = [
        [
            row["arm"],
            f"{row['correlation']:+.2f}",
            f"{row['slope']:+.3f}",
            f"{row['same_sign']:.0%}",
            f"{row['predicted']:+.2f}",
            f"{row['observed']:+.3f}",
            str(row["points"]),
        ]
        for row in summarize(rows)
    ]
    text = [
        "## Predicted and observed change of the entropy",
        "The paper's Entropy-Clip Rule (Eq. 6-7) predicts that an update changes the entropy by minus the covariance "
        "of log-probability and advantage over the tokens that pass a gradient, times a learning rate. The prediction "
        "here is minus the sum of `bapo/entropy_covariance` over the updates of a generation, without that rate. The "
        "observation is the change of the entropy (nats a token) from the samples of this generation to those of the "
        f"next, each under the policy that sampled it. Sums of the demo, {settings['generations']} generations, "
        f"learning rate {settings['lr']:g}, {len({row['seed'] for row in rows})} seeds.",
        table(
            ["Arm", "Correlation", "Slope", "Same sign", "Predicted, whole run", "Observed, whole run", "Generations"],
            cells,
        ),
        "The sums over a whole run tell whether the rule has the direction right. The correlation tells whether it "
        "knows one generation from the next; near 0, it does not.",
        f"![Predicted against observed change of the entropy]({FIGURE})",
        provenance(content),
    ]
    return Section("\n\n".join(text), figures={FIGURE: draw(rows)})


def draw(rows: Sequence[dict]) -> Figure:
    """Return the scatter of predicted and observed changes."""
    figure = Figure(figsize=(7.5, 4), dpi=120, layout="constrained")
    panel = figure.subplots()
    for arm in dict.fromkeys(row["arm"] for row in rows):
        of_arm = [row for row in rows if row["arm"] == arm]
        panel.scatter(
            [value for row in of_arm for value in row["predicted"]],
            [value for row in of_arm for value in row["observed"]],
            s=14,
            alpha=0.6,
            label=arm,
        )
    panel.axhline(0, color="gray", linewidth=0.8)
    panel.axvline(0, color="gray", linewidth=0.8)
    panel.set_xlabel("minus the covariance, summed over a generation's updates")
    panel.set_ylabel("change of the entropy (nats a token)")
    panel.grid(alpha=0.3)
    panel.legend(fontsize="small")
    return figure


if __name__ == "__main__":
    main()
