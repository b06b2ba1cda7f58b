"""The rows of the study, one for each run: what a table or a figure reads of it."""

import itertools
import math
import operator
import statistics
from collections.abc import Callable, Sequence
from dataclasses import fields

from bapo_trl import BAPOConfig
from benchmarks.run_pool import run_key

from .figures import BINNED, has_ranges, is_drawn
from .plan import Preset, Run


NAMES = ("purpose", "task", "arm", "staleness_setting", "learning_rate", "seed")  # what tells a row from the others


def rows_of(
    runs: Sequence[Run], preset: Preset, rows: dict[str, dict], make: Callable[[list[dict]], list[dict | None]]
) -> list[dict]:
    """
    Return the rows of runs, and make the runs that have none.

    Args:
        runs (sequence of [`Run`]):
            Runs of the study.
        preset (`Preset`):
            Size of the study.
        rows (`dict[str, dict]`):
            Rows by the key of their run. No run is made that has a row here; rows of new ones are added.
        make (callable):
            Returns the results of some specs, `None` for a run that is not made now.

    Returns:
        `list[dict]`: The rows, without those of runs that are not made now.

    Raises:
        ValueError: If there is a row of the same name whose run had other settings.
    """
    specs = [preset.spec(run) for run in runs]
    keys = [run_key(spec) for spec in specs]
    missing = {key: (run, spec) for key, run, spec in zip(keys, runs, specs, strict=True) if key not in rows}
    taken = {tuple(row[name] for name in NAMES) for row in rows.values()}
    for run, _ in missing.values():
        if tuple(name_row(run).values()) in taken:
            raise ValueError(
                f"There is a row of {run}, made with other settings: give the arm another name, or take the row out."
            )
    if missing:
        print(f"{len(runs) - len(missing)} of {len(runs)} runs have rows.", flush=True)
        results = make([spec for _, spec in missing.values()])
        for (key, (run, spec)), result in zip(missing.items(), results, strict=True):
            if result is not None:
                rows[key] = {"key": key, **run_to_row(run, result, spec["args"])}
    return [rows[key] for key in keys if key in rows]


def name_row(run: Run) -> dict:
    """Return the part of a row that says which run it is of."""
    values = (run.purpose, run.task, run.arm, run.staleness.name, run.learning_rate, run.seed)
    return dict(zip(NAMES, values, strict=True))


def run_to_row(run: Run, result: dict, settings: dict) -> dict:
    """Return the row of a run from its result, as [`training_run.run`] returns it, and the settings of its trainer."""
    series, points = result["series"], result["held_out"]
    accuracies = [point["sampled"] for point in points]  # 0 from where a run broke off
    norms = [norm for norm in series["grad_norm"] if norm]
    area = sum(
        (right["update"] - left["update"]) * (left["sampled"] + right["sampled"]) / 2
        for left, right in itertools.pairwise(points)
    )
    return {
        **name_row(run),
        "final": accuracies[-1],
        "greedy": points[-1]["greedy"],
        **({"pass@k": result["pass@k"]} if "pass@k" in result else {}),
        "area": round(area / points[-1]["update"], 4),
        "entropy_ratio": None if "failure" in result else round(points[-1]["entropy"] / points[0]["entropy"], 4),
        "gradient_peak": round(max(norms) / statistics.median(norms), 2) if norms else None,
        "undefined_gradients": series["grad_norm"][: result["updates"]].count(None),
        "largest_fall": round(max(map(operator.sub, itertools.accumulate(accuracies, max), accuracies)), 4),
        "is_collapsed": accuracies[-1] < max(accuracies) / 2,
        **describe_search(settings, series),
        **(_weights_of(run, series["bapo/negative_weight"]) if settings.get("negative_weight_min", 1) < 1 else {}),
        "updates": result["updates"],
        "generated_tokens": result["generated_tokens"][-1],
        "tokens_per_update": round(result["generated_tokens"][-1] * run.staleness.num_iterations / result["updates"]),
        "seconds": result["seconds"],
        "means": result["means"],
        **_curves(run, series, points),
    }


def _weights_of(run: Run, weights: list[float | None]) -> dict:
    """Return their mean, and for the control that takes them in another order, all of them."""
    mean = round(statistics.mean(weight for weight in weights if weight is not None), 4)
    return {"mean_weight": mean} if run.purpose != "reported" else {"weights": weights, "mean_weight": mean}


def _curves(run: Run, series: dict[str, list], points: Sequence[dict]) -> dict:
    """Return the way of a run that is drawn; of another, where it began and its last two measurements."""
    held_out = [[point[key] for key in ("update", "sampled", "greedy", "entropy")] for point in points]
    is_whole = is_drawn(run.purpose, run.task, run.arm, run.staleness.name)
    names = list(series) if has_ranges(run.purpose, run.arm, run.staleness.name) else BINNED if is_whole else ()
    bins = {name: bin_means(series[name]) for name in names if name in series}
    return {
        "held_out": held_out if is_whole else [held_out[0], *held_out[1:][-2:]],
        **({"bins": bins} if bins else {}),
    }


def describe_search(settings: dict, series: dict[str, list]) -> dict:
    """
    Return what the search of a run with these settings did, nothing where there is none.

    Shares of the updates in which it stayed at the start and went to the end of its path; how much the positive share
    under the start bounds varies over the updates, and by how much the search raised it, at most and on average over
    the updates in which it did; the largest importance ratio in the update with the largest gradient.
    """
    settings = {f.name: f.default for f in fields(BAPOConfig)} | settings
    ends = {
        name: (settings[f"ratio_lower_{end}"], settings[f"ratio_upper_{end}"])
        for name, end in (("at_start", "start"), ("at_end", "max"))
    }
    if "bapo/clip_low" not in series or ends["at_start"] == ends["at_end"]:
        return {}
    shares = [
        pair
        for pair in zip(series["bapo/positive_share_initial"], series["bapo/positive_share"], strict=True)
        if None not in pair
    ]
    initial = [share for share, _ in shares]
    gains = [share - before for before, share in shares if share > before]
    norms = [norm or 0.0 for norm in series["grad_norm"]]
    chosen = [
        bounds for bounds in zip(series["bapo/clip_low"], series["bapo/clip_high"], strict=True) if None not in bounds
    ]
    return {
        **{
            name: round(statistics.mean(math.dist(bounds, end) < 1e-3 for bounds in chosen), 4)
            for name, end in ends.items()
        },
        "initial_share_deviation": round(statistics.pstdev(initial), 4),
        "initial_share_range": [min(initial), max(initial)],
        "largest_share_gain": round(max(gains, default=0.0), 4),
        "mean_share_gain": round(statistics.mean(gains), 4) if gains else 0.0,
        "ratio_at_gradient_peak": series["ratio/max"][norms.index(max(norms))],
    }


def bin_means(values: Sequence[float | None], count: int = 16) -> list[float | None]:
    """Return the means of the defined values in `count` bins, as even as can be, fewer if values are fewer."""
    count = min(count, len(values))
    ends = [index * len(values) // count for index in range(count + 1)]
    parts = [[v for v in values[start:end] if v is not None] for start, end in itertools.pairwise(ends)]
    return [round(statistics.mean(part), 4) if part else None for part in parts]
