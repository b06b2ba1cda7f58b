"""
The replay queue on the embedded task at equal generated tokens: one pass, several passes over the same rows (TRL's
way), several passes drawn from the queue; under BAPO's bounds and under GRPO's fixed ones.

    python benchmarks/replay_study.py --jobs 2

Each arm's learning rate is chosen from a small grid on seeds that are not reported. An interrupted study goes on where
it stopped.
"""

import argparse
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path

from training_run import fixed_clip, run_all

from measuring import save_result


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
    runs = run_all(list(named.values()), finished, jobs)
    rewards: dict[tuple, list[float]] = {}
    for (*key, _), run in zip(named, runs, strict=True):
        rewards.setdefault(tuple(key), []).extend(run["result"]["reward"][-PILOT_GENERATIONS // 4 :])
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
    """Return generated tokens and smoothed held-out accuracy (sampled answers) of a run."""
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


def summarize(results: Sequence[dict]) -> list[dict]:
    """Return a row for each bounds, arm and `replay_zero_advantage`: means and spread over the seeds."""
    final = {}
    for row in results:
        if row["arm"] == "one pass" and not row["replay_zero_advantage"]:
            tokens, accuracies = curve(row)
            final[row["bounds"], row["seed"]] = (accuracies[-1], tokens[-1])
    groups: dict[tuple, list[dict]] = {}
    for row in results:
        groups.setdefault((row["bounds"], row["arm"], row["replay_zero_advantage"]), []).append(row)
    summary = []
    for (bounds, arm, is_with), rows in groups.items():
        reached = [(tokens_to_reach(row, final[bounds, row["seed"]][0]), row["seed"]) for row in rows]
        ratios = [tokens / final[bounds, seed][1] for tokens, seed in reached if tokens is not None]
        summary.append(
            {
                "bounds": bounds,
                "arm": arm,
                "replay_zero_advantage": is_with,
                "learning_rate": rows[0]["learning_rate"],
                "updates": rows[0]["updates"],
                "greedy": _mean_and_deviation([row["held_out"][-1]["greedy"] for row in rows]),
                "sampled": _mean_and_deviation([curve(row)[1][-1] for row in rows]),
                "generated_tokens": round(statistics.mean(row["generated_tokens"][-1] for row in rows)),
                "tokens_ratio": _mean_and_deviation(ratios) if len(ratios) > 1 else None,
                "reached": len(ratios),
                "seeds": len(rows),
                "staleness": round(statistics.mean(row["means"]["staleness/mean"] for row in rows), 1),
                "seconds": _mean_and_deviation([row["seconds"] for row in rows]),
            }
        )
    return summary


def _mean_and_deviation(values: Sequence[float]) -> dict[str, float]:
    return {"mean": round(statistics.mean(values), 4), "deviation": round(statistics.stdev(values), 4)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--finished", type=Path, default=Path("outputs/replay_study.jsonl"), help="finished runs")
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
    runs = run_all(list(named.values()), arguments.finished, arguments.jobs)
    results = [
        {
            "seed": seed,
            "bounds": bounds,
            "arm": arm,
            "replay_zero_advantage": is_with,
            "learning_rate": rates[bounds, arm],
            **run["result"],
        }
        for (seed, bounds, arm, is_with), run in zip(named, runs, strict=True)
    ]
    settings = {
        "generations": GENERATIONS,
        "held_out_answers": 1024,
        "learning_rates": LEARNING_RATES,
        "pilot_seeds": PILOT_SEEDS,
        "pilot_generations": PILOT_GENERATIONS,
        "queue": QUEUE,
        "threads": 1,
        "target_tokens_ratio": 0.6,
        "summary": summarize(results),
    }
    save_result("replay_study", "cpu", settings, results)


if __name__ == "__main__":
    main()
