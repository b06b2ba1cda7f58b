"""The statistics of the study: means over the seeds with intervals, and arms compared with BAPO seed by seed."""

import statistics
from collections.abc import Sequence


# Factors of the standard error for 95 % intervals, by the number of seeds (Student's t), which may be 10 at most
INTERVAL_FACTORS = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


def mean_and_interval(values: Sequence[float | None]) -> dict[str, float | None]:
    """Return the mean of the defined values and half the width of its 95 % interval; one value has none."""
    defined = [value for value in values if value is not None]
    half = None
    if len(defined) > 1:
        half = round(INTERVAL_FACTORS[len(defined)] * statistics.stdev(defined) / len(defined) ** 0.5, 4)
    return {"mean": round(statistics.mean(defined), 4) if defined else None, "half_width": half}


def summarize(rows: Sequence[dict]) -> list[dict]:
    """
    Return a row for each task, staleness setting and arm: means over the seeds, with intervals.

    `gains` are how far the runs end above those of BAPO with the same seeds, `gain` is their mean.
    """
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["staleness_setting"], row["arm"]), []).append(row)
    bapo = {(row["task"], row["staleness_setting"], row["seed"]): row["final"] for row in rows if row["arm"] == "BAPO"}
    gains = {
        (task, staleness, arm): [
            round(row["final"] - bapo[task, staleness, row["seed"]], 4)
            for row in group
            if (task, staleness, row["seed"]) in bapo
        ]
        for (task, staleness, arm), group in groups.items()
    }
    return [
        {
            "task": task,
            "staleness_setting": staleness,
            "arm": arm,
            "learning_rate": group[0]["learning_rate"],
            "seeds": [row["seed"] for row in group],
            "gains": gains[task, staleness, arm],
            "gain": mean_and_interval(gains[task, staleness, arm]),
            **{
                key: mean_and_interval([row[key] for row in group])
                for key in ("final", "greedy", "area", "largest_fall", "entropy_ratio", "gradient_peak")
            },
            "collapsed": statistics.mean(row["is_collapsed"] for row in group),
            "undefined_gradients": sum(row["undefined_gradients"] for row in group),
            **{
                key: round(statistics.mean(row[key] for row in group), 4)
                for key in ("at_start", "at_end")
                if key in group[0]
            },
            "ratios_at_gradient_peak": [
                row["ratio_at_gradient_peak"] for row in group if "ratio_at_gradient_peak" in row
            ],
            "tokens_per_update": round(statistics.mean(row["tokens_per_update"] for row in group)),
            "generated_tokens": round(statistics.mean(row["generated_tokens"] for row in group)),
            "seconds_per_update": round(statistics.median(row["seconds"] / row["updates"] for row in group), 3),
            "means": {
                name: round(statistics.mean(row["means"][name] for row in group), 4)
                for name in group[0]["means"]
                if all(name in row["means"] for row in group)
            },
        }
        for (task, staleness, arm), group in groups.items()
    ]


def pilot_accuracies(rows: Sequence[dict]) -> dict[tuple[str, str], dict[float, float]]:
    """
    Return the accuracies of the pilots of one task, by arm and staleness setting and then by learning rate.

    They are means of the last two measurements, over the seeds.
    """
    ends: dict[tuple[str, str], dict[float, list[float]]] = {}
    for row in rows:
        by_rate = ends.setdefault((row["arm"], row["staleness_setting"]), {})
        by_rate.setdefault(row["learning_rate"], []).extend(sampled for _, sampled, *_ in row["held_out"][-2:])
    return {
        key: {rate: round(statistics.mean(by_rate[rate]), 4) for rate in sorted(by_rate)}
        for key, by_rate in ends.items()
    }


def best_rate(accuracies: dict[float, float]) -> float:
    """Return the learning rate with the best accuracy, of equal ones the lowest."""
    return max(sorted(accuracies), key=accuracies.__getitem__)
