"""Pure: means over seeds, differences paired by seed, how many seeds a difference takes; by scipy."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats


LEVEL, POWER = 0.05, 0.8
MOST_SEEDS = 10_000


@dataclass(frozen=True)
class Mean:
    """A mean over seeds, and half the width of its 95 % interval; NaN where no two seeds differ."""

    value: float
    half_width: float
    count: int

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of 0."""
        return abs(self.value) > self.half_width


@dataclass(frozen=True)
class Difference:
    """How far an arm ends above another, paired by seed."""

    arm: str
    against: str
    mean: Mean  # with an interval that holds for all comparisons at once (Bonferroni)
    values: tuple[float, ...]  # one of each seed
    p_value: float  # of the paired t-test, adjusted for the number of comparisons (Holm); NaN for less than two seeds


def mean_over_seeds(values: Sequence[float], comparisons: int = 1) -> Mean:
    """
    Return the mean of values, one of each seed, at least one, and half the width of its interval, by Student's t.

    `comparisons` intervals are to hold all at once, with a probability of 95 %: each is widened to 1 - 0.05 / that.
    """
    count = len(values)
    center = math.fsum(values) / count
    if count < 2:
        return Mean(center, math.nan, count)
    if np.ptp(values) < 1e-9:  # seeds that all agree tell no spread
        return Mean(center, math.nan, count)
    factor = stats.t.ppf(1 - LEVEL / comparisons / 2, count - 1)
    return Mean(center, float(factor * stats.sem(values)), count)


def differences(
    finals: Mapping[str, Mapping[int, float]], pairs: Sequence[tuple[str, str]], comparisons: int | None = None
) -> list[Difference]:
    """
    Compare arms, seed by seed: the first of each pair with the second. A pair without a common seed is left out.

    Intervals are widened for `comparisons`, by default the number of pairs; p-values always for that number.
    """
    common = {pair: sorted(finals[pair[0]].keys() & finals[pair[1]].keys()) for pair in pairs}
    values = {
        (arm, against): tuple(finals[arm][seed] - finals[against][seed] for seed in seeds)
        for (arm, against), seeds in common.items()
        if seeds
    }
    comparisons = comparisons or len(values)
    holm = _adjusted([_p_value(each) for each in values.values()])
    return [
        Difference(arm, against, mean_over_seeds(each, comparisons), each, p)
        for ((arm, against), each), p in zip(values.items(), holm, strict=True)
    ]


def _p_value(values: Sequence[float]) -> float:
    if len(values) < 2 or np.ptp(values) < 1e-9:
        return math.nan
    return float(stats.ttest_1samp(values, 0.0).pvalue)


def _adjusted(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for their number, by Holm's step-down method; NaN stays, and does not count."""
    order = sorted((p, place) for place, p in enumerate(p_values) if not math.isnan(p))
    adjusted, largest = [math.nan] * len(p_values), 0.0
    for rank, (p, place) in enumerate(order):
        adjusted[place] = largest = max(largest, min(1.0, (len(order) - rank) * p))
    return adjusted


def seeds_for(difference: float, values: Sequence[float], comparisons: int = 1) -> int | None:
    """
    Return how many seeds show a mean difference with a probability of 80 %, at the spread of those on some seeds.

    The level is 0.05 over the `comparisons` at once. `None` for a difference of 0, where fewer than two seeds tell no
    spread, or if more than 10,000 are needed.
    """
    if len(values) < 2 or difference == 0:
        return None
    spread = float(np.std(values, ddof=1))
    if spread == 0:
        return 2
    few, many = 2, 2
    while _power(abs(difference) / spread, many, LEVEL / comparisons) < POWER:
        few, many = many, many * 2
        if few > MOST_SEEDS:
            return None
    while many - few > 1:
        middle = (few + many) // 2
        is_enough = _power(abs(difference) / spread, middle, LEVEL / comparisons) >= POWER
        few, many = (few, middle) if is_enough else (middle, many)
    return many


def _power(effect: float, count: int, level: float) -> float:
    """Return the power of a two-sided paired t-test to show an effect by its sign: noncentral t distribution."""
    critical, shift = stats.t.ppf(1 - level / 2, count - 1), effect * math.sqrt(count)
    return float(stats.nct.sf(critical, count - 1, shift))  # scipy's lower tail is NaN for many large shifts
