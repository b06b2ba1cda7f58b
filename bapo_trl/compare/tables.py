"""Write the tables of a study, and its verdict in words that claim no more than the intervals show."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, NamedTuple

from .results import Row
from .statistics import Difference, Mean, differences, differences_from, mean_over_seeds, seeds_for
from .study import name_setting
from .target import COSTS


Targets = dict[str, dict[int, dict[str, Any]]]  # `Row.to_target` by method and seed

SMALL = 0.03
"""A difference in accuracy: the tables give the number of seeds that would show it."""

FEWEST_SEEDS = 3
"""With fewer seeds, no number of needed seeds is given: the spread of two values is a guess."""


class Figure(NamedTuple):
    """A column of the tables."""

    form: str
    read: Callable[[Row], float | None]
    width: float = math.inf  # of what can be measured


ACCURACIES = {
    "final accuracy": Figure(".3f", lambda row: row.final, 1.0),
    "mean accuracy": Figure(".3f", lambda row: row.mean_accuracy, 1.0),
    "pass@k": Figure(".3f", lambda row: row.pass_at_k, 1.0),
    "max drawdown": Figure(".3f", lambda row: row.max_drawdown, 1.0),
    "start accuracy": Figure(".3f", lambda row: row.start, 1.0),
}
"""Columns of the first table, by title."""

COURSE = {
    "gradient peak": Figure(".1f", lambda row: row.gradient_peak),
    "entropy at end / start": Figure(".2f", lambda row: row.entropy_ratio),
    "positive contribution": Figure(".2f", lambda row: row.share, 1.0),
    "searched bounds at limits": Figure(".0%", lambda row: row.at_limits, 1.0),
    "generated tokens": Figure(",.0f", lambda row: row.generated_tokens),
    "seconds": Figure(",.0f", lambda row: row.seconds),
}
"""Columns of the second table."""


@dataclass(frozen=True)
class Comparison:
    """Arms in one setting."""

    sweep: dict[str, Any]  # the setting: what the study varies
    arms: dict[str, list[Row]]  # runs of each arm, those that failed too
    baseline: str  # arm that the others are compared with

    @property
    def finals(self) -> dict[str, dict[int, float]]:
        """Final accuracy of each arm by seed, of the runs that did not fail."""
        return {arm: {row.seed: row.final for row in rows if row.final is not None} for arm, rows in self.arms.items()}

    def means(self, figure: Figure) -> dict[str, Mean]:
        """Return the mean over the seeds of a figure, by arm, of the arms that have it."""
        means = {}
        for arm, rows in self.arms.items():
            values = [figure.read(row) for row in rows if row.error is None]
            defined = [value for value in values if value is not None]
            if defined:
                means[arm] = within(mean_over_seeds(defined), figure.width)
        return means

    def differences(self, pairs: Sequence[tuple[str, str]] | None = None) -> list[Difference]:
        """Return differences of final accuracy over common seeds, by default of each arm from the baseline."""
        if pairs is None:
            pairs = [(arm, self.baseline) for arm in self.arms if arm != self.baseline and self.baseline in self.arms]
        return [replace(each, mean=within(each.mean, 2.0)) for each in differences(self.finals, pairs)]


def within(mean: Mean, width: float) -> Mean:
    """Return a mean without its interval if that is wider than what can be measured, as it is of two far seeds."""
    return mean if 2 * mean.half_width <= width else replace(mean, half_width=math.nan)


def compare(rows: Iterable[Row], arms: Sequence[str], baseline: str) -> list[Comparison]:
    """Return a comparison for each setting that has a run, in the order of the rows, with the arms that have one."""
    settings: dict[str, Comparison] = {}
    for row in sorted(rows, key=lambda row: (arms.index(row.arm), row.seed)):
        comparison = settings.setdefault(name_setting(row.sweep), Comparison(row.sweep, {}, baseline))
        comparison.arms.setdefault(row.arm, []).append(row)
    return list(settings.values())


def with_interval(mean: Mean | None, form: str, sign: str = "") -> str:
    """Return a mean with the half-width of its interval, as text."""
    if mean is None:
        return "-"
    half = "" if math.isnan(mean.half_width) else f" ± {mean.half_width:{form}}"
    return f"{mean.value:{sign}{form}}{half}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, its columns padded to be read as text too."""
    lines = [list(line) for line in (header, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    padded = [f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines]
    return "\n".join([padded[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *padded[1:]])


def as_markdown(comparisons: Sequence[Comparison]) -> str:
    """Return the tables and the verdict of each setting."""
    parts = []
    for comparison in comparisons:
        title = f"## {name_setting(comparison.sweep)}" if comparison.sweep else ""
        tables = [_table(comparison, figures) for figures in (ACCURACIES, COURSE)]
        failures = [
            f"- {row.arm}, seed {row.seed}, failed: {row.error}"
            for rows in comparison.arms.values()
            for row in rows
            if row.error is not None
        ]
        verdicts = [f"- {line}" for line in verdict(comparison)]
        lists = ["\n".join(lines) for lines in (failures, _health(comparison), verdicts)]
        parts += [title, *tables, _paired(comparison), _to_target(comparison), *lists]
    return "\n\n".join(filter(None, parts))


def _table(comparison: Comparison, figures: dict[str, Figure]) -> str:
    means = {title: comparison.means(figure) for title, figure in figures.items()}
    shown = [title for title, by_arm in means.items() if by_arm]
    cells = [
        [arm, str(len(finals)), *(with_interval(means[title].get(arm), figures[title].form) for title in shown)]
        for arm, finals in comparison.finals.items()
    ]
    return markdown(["method", "seeds", *shown], cells) if shown else ""


def _paired(comparison: Comparison) -> str:
    """Return the differences from the baseline, each with the accuracies of both sides on their common seeds."""
    finals, baseline = comparison.finals, comparison.baseline

    def on_common_seeds(arm: str, other: str) -> str:
        seeds = finals[arm].keys() & finals[other].keys()
        return f"{math.fsum(finals[arm][seed] for seed in seeds) / len(seeds):.3f}"

    cells = [
        [
            each.arm,
            str(len(each.values)),
            on_common_seeds(each.arm, baseline),
            on_common_seeds(baseline, each.arm),
            with_interval(each.mean, ".3f", "+"),
            "-" if math.isnan(each.p_value) else f"{each.p_value:.3f}",
            f"{sum(value > 0 for value in each.values)} of {len(each.values)}",
            str(_seeds_for(SMALL, each) or "-"),
        ]
        for each in comparison.differences()
    ]
    header = ["method", "common seeds", "accuracy on them", f"{baseline} on them", "difference"]
    header += ["p (Holm)", "seeds above 0", f"seeds to show {SMALL}"]
    return markdown(header, cells) if cells else ""


def _to_target(comparison: Comparison) -> str:
    """Return what each method took to the target accuracy, relative to the baseline over common seeds."""
    targets = {
        arm: {row.seed: row.to_target for row in rows if row.to_target is not None}
        for arm, rows in comparison.arms.items()
    }
    known = [target for by_seed in targets.values() for target in by_seed.values()]
    if not known:
        return ""
    ratios = [relative_costs(targets, comparison.baseline, name) for name in COSTS]
    cells = []
    for arm, by_seed in targets.items():
        reached = [target for target in by_seed.values() if target["reached"]]
        seconds = [target["seconds"] for target in reached if target["seconds"] is not None]
        shown = f"{statistics.fmean(seconds):,.0f}" if seconds else "-"
        cells.append([arm, f"{len(reached)} of {len(by_seed)}", shown, *(by_arm.get(arm, "-") for by_arm in ratios)])
    unit = "CPU seconds" if known[0]["clock"] == "cpu" else "seconds"
    header = ["method", f"reached {known[0]['target']:g}", unit]
    return markdown([*header, *(f"{name} / {comparison.baseline}'s" for name in (unit, *COSTS[1:]))], cells)


def relative_costs(targets: Targets, baseline: str, name: str, has_interval: bool = True) -> dict[str, str]:
    """
    Return a cost of each method's runs to the target relative to the baseline's, as text: a geometric mean over common
    seeds, corrected as differences in accuracy are, or a bound where a run of either method missed the target.
    """
    logs = {
        arm: {seed: math.log(target[name]) for seed, target in by_seed.items() if target[name]}
        for arm, by_seed in targets.items()
    }
    return {
        arm: _as_ratio(ratio.mean, targets[arm], targets[baseline], has_interval)
        for arm, ratio in differences_from(logs, baseline).items()
    }


def _as_ratio(log: Mean, targets: Mapping[int, Any], of_baseline: Mapping[int, Any], has_interval: bool) -> str:
    seeds = targets.keys() & of_baseline.keys()
    misses, base_misses = (any(not of[seed]["reached"] for seed in seeds) for of in (targets, of_baseline))
    if misses and base_misses:
        return "unknown"
    if misses or base_misses:
        return f"{'at least' if misses else 'at most'} {math.exp(log.value):.2f}"
    low, high = (math.exp(log.value + sign * log.half_width) for sign in (-1, 1))
    interval = f" ({low:.2f} to {high:.2f})" if has_interval and not math.isnan(log.half_width) else ""
    return f"{math.exp(log.value):.2f}{interval}"


def _seeds_for(size: float, difference: Difference) -> int | None:
    if len(difference.values) < FEWEST_SEEDS:
        return None
    return seeds_for(size, difference.values, difference.comparisons)


def _health(comparison: Comparison) -> list[str]:
    """Return the warnings of the report's health check: a line for each arm and warning, with its seeds."""
    seeds: dict[str, list[str]] = {}
    for arm, rows in comparison.arms.items():
        for row in rows:
            for name in row.warnings:
                seeds.setdefault(f"- {arm}, health warning: {name}", []).append(str(row.seed))
    return [f"{line} (seed{'s' * (len(some) > 1)} {', '.join(some)})" for line, some in seeds.items()]


def verdict(comparison: Comparison) -> list[str]:
    """
    Return a sentence for each difference: an order only where its interval excludes 0.

    First each arm against the baseline. Then the two arms of the highest accuracy, if neither is the baseline, with
    the correction for all pairs of arms.
    """
    found = comparison.differences()
    means = {arm: sum(finals.values()) / len(finals) for arm, finals in comparison.finals.items() if finals}
    highest = sorted(means, key=means.__getitem__, reverse=True)[:2]
    if len(highest) == 2 and comparison.baseline not in highest:
        pairs = comparison.differences(list(combinations(comparison.arms, 2)))
        found += [each for each in pairs if {each.arm, each.baseline} == set(highest)]
    return [_sentence(each) for each in found]


def _sentence(each: Difference) -> str:
    count = len(each.values)
    if each.mean.excludes_zero:
        above, below = (each.arm, each.baseline) if each.mean.value > 0 else (each.baseline, each.arm)
        on = sum((value > 0) == (each.mean.value > 0) and value != 0 for value in each.values)
        return f"{above} reached a higher accuracy than {below} on {on} of {count} seeds."
    alike = f"No significant difference between {each.arm} and {each.baseline}"
    if count < FEWEST_SEEDS:
        return f"{alike} on {count} seed{'s' * (count > 1)}: run at least {FEWEST_SEEDS}."
    needed = _seeds_for(each.mean.value, each)
    if needed is None:
        return f"{alike}."
    lacking = max(1, needed - count)
    return f"{alike}: about {lacking} more seed{'s' * (lacking > 1)} would show one of the measured size."
