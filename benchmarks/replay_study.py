"""
The replay queue on the embedded task at equal generated tokens, under BAPO's bounds and under GRPO's fixed ones.

    python -m benchmarks.replay_study --jobs 2

Arms make one pass, several passes over the same rows (TRL's way), or several passes drawn from the queue. Each arm's
learning rate is chosen from a small grid on seeds that are not reported. An interrupted study goes on where it
stopped.
"""

import argparse
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.common import ROOT, Section, link_to_tables, provenance, save_result, table
from benchmarks.run_pool import run_all
from benchmarks.training_run import fixed_clip


GENERATIONS, PILOT_GENERATIONS = 24, 16
SEEDS, PILOT_SEEDS = (0, 1, 2, 3, 4), (1000, 1001)
LEARNING_RATES = (1.25e-4, 2.5e-4, 5e-4, 1e-3)
BOUNDS = {"BAPO": {}, "GRPO": fixed_clip(0.8, 1.2)}
QUEUE = {"replay_fraction": 0.5, "replay_capacity": 8192}
ZERO_ADVANTAGE = {"replay_zero_advantage": True, "replay_capacity": 8192}

# Arms that share a learning rate: without and with `replay_zero_advantage`
ARMS = {
    "one pass": ({}, ZERO_ADVANTAGE),
    "same rows, 2 passes": ({"num_iterations": 2}, None),
    "same rows, 4 passes": ({"num_iterations": 4}, None),
    "same rows, 8 passes": ({"num_iterations": 8}, None),
    "queue, 2 passes": (
        {**QUEUE, "num_iterations": 2},
        {**QUEUE, **ZERO_ADVANTAGE, "num_iterations": 2},
    ),
    "queue, 4 passes": (
        {**QUEUE, "num_iterations": 4},
        {**QUEUE, **ZERO_ADVANTAGE, "num_iterations": 4},
    ),
    "queue, 8 passes": (None, {**QUEUE, **ZERO_ADVANTAGE, "num_iterations": 8}),
    "queue in later passes only, 2 passes": (None, {**ZERO_ADVANTAGE, "num_iterations": 2}),
    "queue in later passes only, 4 passes": (None, {**ZERO_ADVANTAGE, "num_iterations": 4}),
}
# Not chosen again. With `replay_zero_advantage` there is a queue, and later passes are drawn from it: the nearest to
# "same rows" with it is the queue in later passes only.
LEARNING_RATE_OF = {
    "same rows, 8 passes": "same rows, 4 passes",
    "queue, 8 passes": "queue, 4 passes",
    "queue in later passes only, 2 passes": "queue, 2 passes",
    "queue in later passes only, 4 passes": "queue, 4 passes",
}
FIGURE = "replay_study.png"
NAMES = ("Bounds", "Arm", "`replay_zero_advantage`")  # columns that tell the rows of both tables apart


def spec(bounds: str, settings: dict, learning_rate: float, seed: int, generations: int) -> dict:
    """Return what [`training_run.run`] takes."""
    args = {**BOUNDS[bounds], **settings, "learning_rate": learning_rate}
    return {"seed": seed, "generations": generations, "args": args}


def choose_learning_rates(finished: Path, jobs: int) -> dict[tuple[str, str], float]:
    """Return the learning rate of each bounds and arm: the best mean reward at the end, over the pilot seeds."""
    named = {
        (bounds, arm, rate, seed): spec(bounds, ARMS[arm][0], rate, seed, PILOT_GENERATIONS)
        for arm in ARMS
        if arm not in LEARNING_RATE_OF
        for bounds in BOUNDS
        for rate in LEARNING_RATES
        for seed in PILOT_SEEDS
    }
    results = run_all(list(named.values()), finished, jobs)
    rewards: dict[tuple, list[float]] = {}
    for (*key, _), result in zip(named, results, strict=True):
        rewards.setdefault(tuple(key), []).extend(result["reward"][-PILOT_GENERATIONS // 4 :])
    scores = {key: statistics.mean(values) for key, values in rewards.items()}
    for key, score in scores.items():
        print(f"  {' / '.join(map(str, key))}: {score:.3f}")
    chosen = {
        (bounds, arm): max(LEARNING_RATES, key=lambda rate: scores[bounds, arm, rate])
        for bounds, arm in {key[:2] for key in scores}
    }
    return chosen | {
        (bounds, arm): chosen[bounds, other] for arm, other in LEARNING_RATE_OF.items() for bounds in BOUNDS
    }


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the means of three neighbours, two at the ends."""
    return [statistics.mean(values[max(0, index - 1) : index + 2]) for index in range(len(values))]


def curve(result: dict) -> tuple[list[int], list[float]]:
    """Return generated tokens and smoothed held-out accuracy (sampled completions) of a run."""
    points = [point for point in result["held_out"] if point["generations"]]  # without the one before training
    tokens = [result["generated_tokens"][point["generations"] - 1] for point in points]
    return tokens, smoothed([point["sampled"] for point in points])


def tokens_to_reach(result: dict, accuracy: float) -> float | None:
    """Return the generated tokens at which a run first has an accuracy, between two points by interpolation."""
    points = list(zip(*curve(result), strict=True))
    if points[0][1] >= accuracy:
        return points[0][0]
    for (tokens, low), (next_tokens, high) in itertools.pairwise(points):
        if high >= accuracy:
            return tokens + (next_tokens - tokens) * (accuracy - low) / (high - low)
    return None


def summarize(rows: Sequence[dict]) -> list[dict]:
    """Return a row for each bounds, arm and `replay_zero_advantage`: means and spread over the seeds."""
    final = {}
    for row in rows:
        if row["arm"] == "one pass" and not row["replay_zero_advantage"]:
            tokens, accuracies = curve(row)
            final[row["bounds"], row["seed"]] = (accuracies[-1], tokens[-1])
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault((row["bounds"], row["arm"], row["replay_zero_advantage"]), []).append(row)
    summary = []
    for (bounds, arm, is_with), group in groups.items():
        reached = [(tokens_to_reach(row, final[bounds, row["seed"]][0]), row["seed"]) for row in group]
        ratios = [tokens / final[bounds, seed][1] for tokens, seed in reached if tokens is not None]
        summary.append(
            {
                "bounds": bounds,
                "arm": arm,
                "replay_zero_advantage": is_with,
                "learning_rate": group[0]["learning_rate"],
                "updates": group[0]["updates"],
                "greedy": _mean_and_deviation([row["held_out"][-1]["greedy"] for row in group]),
                "sampled": _mean_and_deviation([curve(row)[1][-1] for row in group]),
                "generated_tokens": round(statistics.mean(row["generated_tokens"][-1] for row in group)),
                "tokens_ratio": _mean_and_deviation(ratios) if len(ratios) > 1 else None,
                "reached": len(ratios),
                "seeds": len(group),
                "staleness": round(statistics.mean(row["means"]["staleness/mean"] for row in group), 1),
                "seconds": _mean_and_deviation([row["seconds"] for row in group]),
            }
        )
    return summary


def _mean_and_deviation(values: Sequence[float]) -> dict[str, float]:
    return {"mean": round(statistics.mean(values), 4), "deviation": round(statistics.stdev(values), 4)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--finished", type=Path, default=ROOT / "outputs" / "replay_study.jsonl", help="finished runs")
    arguments = parser.parse_args()

    rates = choose_learning_rates(arguments.finished, arguments.jobs)
    named = {
        (seed, bounds, arm, is_with): spec(bounds, settings, rates[bounds, arm], seed, GENERATIONS)
        for seed in SEEDS
        for arm, pair in ARMS.items()
        for is_with, settings in zip((False, True), pair, strict=True)
        if settings is not None
        for bounds in BOUNDS
    }
    results = run_all(list(named.values()), arguments.finished, arguments.jobs)
    rows = [
        {
            "seed": seed,
            "bounds": bounds,
            "arm": arm,
            "replay_zero_advantage": is_with,
            "learning_rate": rates[bounds, arm],
            **{key: value for key, value in result.items() if key != "series"},
        }
        for (seed, bounds, arm, is_with), result in zip(named, results, strict=True)
    ]
    settings = {
        "generations": GENERATIONS,
        "held_out_completions": 1024,
        "learning_rates": LEARNING_RATES,
        "pilot_seeds": PILOT_SEEDS,
        "pilot_generations": PILOT_GENERATIONS,
        "queue": QUEUE,
        "threads": 1,
        "target_tokens_ratio": 0.6,
    }
    save_result("replay_study", "cpu", settings, rows)


# The section of the results pages


def render(content: dict) -> Section:
    """Return the section of a result."""
    settings, summary = content["settings"], summarize(content["results"])
    heading, target = "Replay at equal generated tokens", settings["target_tokens_ratio"]
    queue = [row for row in summary if row["arm"].startswith("queue") and row["reached"] == row["seeds"]]
    best = min(queue, key=lambda row: row["tokens_ratio"]["mean"])
    tokens = [row["generated_tokens"] for row in summary]
    rates = ", ".join(f"{rate:g}" for rate in settings["learning_rates"])
    text = [
        f"## {heading}",
        f"Every run generates {settings['generations']} times 1,024 completions to the embedded task ({min(tokens):,} "
        f"to {max(tokens):,} tokens). Figures are means over 5 seeds ± standard deviation.",
        "Arms make one pass over a generation, several passes over the same rows (TRL's `num_iterations`), or several "
        f"passes with the queue (`replay_fraction` {settings['queue']['replay_fraction']}). GRPO means the fixed clip "
        "range 0.8 to 1.2 in the same code. `replay_zero_advantage` needs a queue, and later passes are drawn from "
        'it: nearest to TRL\'s passes are then the arms "queue in later passes only".',
        f"The learning rate of an arm is the best of {rates} on two other seeds ({settings['pilot_generations']} "
        "generations), the same with and without `replay_zero_advantage`. The arms of 8 passes take that of 4, which "
        "for BAPO with the queue is the smallest of the grid. Those with the queue in later passes only take that of "
        "the queue.",
        "Tokens to same accuracy is set against the run of one pass with the same bounds and seed. It is the tokens "
        "generated until the final accuracy of one pass is reached, over all tokens of that pass. "
        "Accuracy is that of sampled completions to held-out problems, the mean of three neighbouring measurements. "
        "In parentheses: how many seeds got there. The mean is over these.",
        f"Aim: the queue needs at most {target} of the tokens of one pass. In {len(queue)} of its arms all seeds got "
        f"there. The best of them is {best['arm']} with {best['bounds']} bounds"
        f"{' and' if best['replay_zero_advantage'] else ' without'} `replay_zero_advantage`. It needs "
        f"{best['tokens_ratio']['mean']:.2f}: "
        + ("met." if best["tokens_ratio"]["mean"] <= target else "**missed**."),
        table([*NAMES, "Sampled", "Tokens to same accuracy", "Staleness (versions)"], map(main_cells, summary)),
        f"Learning rates, greedy accuracy, updates and seconds: {link_to_tables(heading)}.",
        "The figure shows accuracy against generated tokens and against wall time (the mean of a generation and its "
        "updates, times the generations so far). Generation is cheap in this task, at 4 tokens a completion: here "
        "several passes save tokens and not time.",
        f"![Held-out accuracy by generated tokens and by wall time]({FIGURE})",
        provenance(content),
    ]
    tables = [
        f"## {heading}",
        "Seconds are those of training and generation, with other runs beside.",
        table([*NAMES, "Learning rate", "Greedy", "Updates", "Seconds"], map(other_cells, summary)),
    ]
    return Section("\n\n".join(text), "\n\n".join(tables), {FIGURE: draw(content["results"])})


def main_cells(row: dict) -> list[str]:
    """Return the cells of a row of the page's table."""
    ratio, reached = row["tokens_ratio"], f"{row['reached']} of {row['seeds']}"
    return [
        *_names(row),
        f"{row['sampled']['mean']:.3f} ± {row['sampled']['deviation']:.3f}",
        "-" if ratio is None else f"{ratio['mean']:.2f} ± {ratio['deviation']:.2f} ({reached})",
        f"{row['staleness']:.1f}",
    ]


def other_cells(row: dict) -> list[str]:
    """Return the cells of a row of the table on the page of tables."""
    return [
        *_names(row),
        f"{row['learning_rate']:g}",
        f"{row['greedy']['mean']:.3f} ± {row['greedy']['deviation']:.3f}",
        str(row["updates"]),
        f"{row['seconds']['mean']:.0f}",
    ]


def _names(row: dict) -> list[str]:
    return [row["bounds"], row["arm"], "yes" if row["replay_zero_advantage"] else "no"]


# Lines of the figure: arms, with and without `replay_zero_advantage`
LINES = {
    ("one pass", False): ("black", "-"),
    ("same rows, 2 passes", False): ("tab:blue", "-"),
    ("same rows, 4 passes", False): ("tab:blue", "--"),
    ("same rows, 8 passes", False): ("tab:blue", ":"),
    ("queue, 2 passes", False): ("tab:orange", "-"),
    ("queue, 4 passes", False): ("tab:orange", "--"),
    ("queue, 2 passes", True): ("tab:red", "-"),
    ("queue, 4 passes", True): ("tab:red", "--"),
    ("queue, 8 passes", True): ("tab:red", ":"),
}


def draw(rows: Sequence[dict]) -> Figure:
    """Return the figure of held-out accuracy by generated tokens and wall time, means over the seeds."""
    runs: dict[tuple, list[dict]] = {}
    for row in rows:
        runs.setdefault((row["bounds"], row["arm"], row["replay_zero_advantage"]), []).append(row)
    figure = Figure(figsize=(11, 8.5), dpi=120, layout="constrained")
    panels = figure.subplots(2, 2, sharey=True)
    for column, bounds in zip(panels.T, ("BAPO", "GRPO"), strict=True):
        for (arm, is_with), (color, style) in LINES.items():
            group = runs[bounds, arm, is_with]
            generations = [point["generations"] for point in group[0]["held_out"] if point["generations"]]
            points = [[point["sampled"] for point in run["held_out"] if point["generations"]] for run in group]
            means = [statistics.mean(values) for values in zip(*points, strict=True)]
            tokens = [group[0]["generated_tokens"][generation - 1] / 1000 for generation in generations]
            seconds_each = statistics.mean(run["seconds"] / len(run["generated_tokens"]) for run in group)
            label = arm + (", zero advantage replaced" if is_with else "")
            for panel, places in zip(
                column, (tokens, [generation * seconds_each for generation in generations]), strict=True
            ):
                panel.plot(places, means, color=color, linestyle=style, label=label)
                panel.grid(alpha=0.3)
        column[0].set_title(f"{bounds} bounds")
        column[0].set_xlabel("generated tokens (thousands)")
        column[1].set_xlabel("seconds of generation and training on one thread")
        column[1].set_xscale("log")
        for panel in column:
            panel.set_ylabel("held-out accuracy (sampled completions)")
    panels[0, 1].legend(fontsize="small")
    return figure


if __name__ == "__main__":
    main()
