"""
The replay queue on the embedded task at equal generated tokens: one pass, several passes over the same rows (TRL's
way), several passes drawn from the queue; under BAPO's bounds and under GRPO's fixed ones.

    python benchmarks/replay_study.py --jobs 2

Each arm's learning rate is chosen from a small grid on a seed that is not reported. An interrupted study goes on where
it stopped.
"""

import argparse
import statistics
from pathlib import Path

from training_run import FIXED_CLIP, run_all

from measuring import save_result


GENERATIONS, PILOT_GENERATIONS = 24, 16
SEEDS, PILOT_SEED = (0, 1, 2, 3, 4), 1000
LEARNING_RATES = (2.5e-4, 5e-4, 1e-3)
BOUNDS = {"BAPO": {}, "GRPO": FIXED_CLIP}
QUEUE = {"replay_fraction": 0.5, "replay_capacity": 8192}
ZERO_ADVANTAGE = {"replay_zero_advantage": True, "replay_capacity": 8192}

# Arms that share a learning rate: without and with `replay_zero_advantage`
ARMS = {
    "one pass": ({}, ZERO_ADVANTAGE),
    "same rows, 2 passes": ({"num_iterations": 2}, None),
    "same rows, 4 passes": ({"num_iterations": 4}, None),
    "queue, 2 passes": (
        {**QUEUE, "num_iterations": 2},
        {**QUEUE, **ZERO_ADVANTAGE, "num_iterations": 2},
    ),
    "queue, 4 passes": (
        {**QUEUE, "num_iterations": 4},
        {**QUEUE, **ZERO_ADVANTAGE, "num_iterations": 4},
    ),
    "queue in later passes only, 2 passes": (None, {**ZERO_ADVANTAGE, "num_iterations": 2}),
    "queue in later passes only, 4 passes": (None, {**ZERO_ADVANTAGE, "num_iterations": 4}),
}
# With `replay_zero_advantage` there is a queue, and later passes are drawn from it: the nearest to "same rows" with it
LEARNING_RATE_OF = {
    "queue in later passes only, 2 passes": "queue, 2 passes",
    "queue in later passes only, 4 passes": "queue, 4 passes",
}


def spec(bounds: str, settings: dict, learning_rate: float, seed: int, generations: int) -> dict:
    """Return what [`training_run.run`] takes."""
    args = {**BOUNDS[bounds], **settings, "learning_rate": learning_rate}
    return {"seed": seed, "generations": generations, "args": args}


def choose_learning_rates(finished: Path, jobs: int) -> dict[tuple[str, str], float]:
    """Return the learning rate of each bounds and arm: the best mean reward of the last quarter, on the pilot seed."""
    named = {
        (bounds, arm, rate): spec(bounds, ARMS[arm][0], rate, PILOT_SEED, PILOT_GENERATIONS)
        for arm in ARMS
        if arm not in LEARNING_RATE_OF
        for bounds in BOUNDS
        for rate in LEARNING_RATES
    }
    runs = run_all(list(named.values()), finished, jobs)
    scores = {
        key: statistics.mean(run["result"]["reward"][-PILOT_GENERATIONS // 4 :])
        for key, run in zip(named, runs, strict=True)
    }
    for key, score in scores.items():
        print(f"  {' / '.join(map(str, key))}: {score:.3f}")
    chosen = {
        (bounds, arm): max(LEARNING_RATES, key=lambda rate: scores[bounds, arm, rate])
        for bounds, arm in {key[:2] for key in scores}
    }
    return chosen | {
        (bounds, arm): chosen[bounds, other] for arm, other in LEARNING_RATE_OF.items() for bounds in BOUNDS
    }


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
    save_result("replay_study", "cpu", {"generations": GENERATIONS, "threads": 1, "queue": QUEUE}, results)


if __name__ == "__main__":
    main()
