"""Means over seeds, differences paired by seed, and the number of seeds that a difference needs. Needs scipy."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats


LEVEL, POWER = 0.05, 0.8
MOST_SEEDS = 10_000


@dataclass(frozen=True)
class Mean:
    """Mean over seeds with the half-width of its 95 % interval, which is NaN if the spread is not known."""

    value: float
    half_width: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of 0."""
        return abs(self.value) > self.half_width


@dataclass(frozen=True)
class Difference:
    """
    Difference in final accuracy between two methods, paired by seed.

    The p-value and the interval are corrected alike (Holm): the interval excludes 0 exactly if the p-value is below
    0.05.
    """

    arm: str
    baseline: str
    mean: Mean
    values: tuple[float, ...]  # one per seed
    p_value: float  # of the paired t-test; NaN if the spread is not known
    comparisons: float = 1.0  # factor of Holm's correction: the level of the pair is 0.05 / `comparisons`


def mean_over_seeds(values: Sequence[float], comparisons: float = 1) -> Mean:
    """
    Return the mean of one value per seed (at least one), and the half-width of its interval by Student's t.

    The level of the interval is 1 - 0.05 / `comparisons`.
    """
    count, spread = len(values), _spread(values)
    factor = stats.t.ppf(1 - LEVEL / comparisons / 2, count - 1) if spread else math.nan
    return Mean(math.fsum(values) / count, float(factor * spread / math.sqrt(count)))


def _spread(values: Sequence[float]) -> float:
    """Return the standard deviation of values; 0 if not known (one value, or all equal)."""
    return 0.0 if len(values) < 2 or np.ptp(values) < 1e-9 else float(np.std(values, ddof=1))


def differences(finals: Mapping[str, Mapping[int, float]], pairs: Sequence[tuple[str, str]]) -> list[Difference]:
    """
    Return the difference between the methods of each pair: a paired t-test over the seeds that both have.

    Intervals and p-values are corrected by Holm's method for all given pairs: the probability that any of them claims
    a difference where there is none is at most 5 %. Pairs without a common seed are skipped.
    """
    values = {}
    for arm, baseline in pairs:
        seeds = sorted(finals[arm].keys() & finals[baseline].keys())
        if seeds:
            values[arm, baseline] = tuple(finals[arm][seed] - finals[baseline][seed] for seed in seeds)
    plain = [float(stats.ttest_1samp(each, 0).pvalue) if _spread(each) else math.nan for each in values.values()]
    return [
        Difference(*pair, mean_over_seeds(each, factor), each, float(np.minimum(factor * p, 1.0)), factor)
        for (pair, each), p, factor in zip(values.items(), plain, _holm(plain), strict=True)
    ]


def differences_from(finals: Mapping[str, Mapping[int, float]], baseline: str) -> dict[str, Difference]:
    """Return the difference of each method from the baseline, by the method."""
    found = differences(finals, [(arm, baseline) for arm in finals if arm != baseline])
    return {each.arm: each for each in found}


def _holm(p_values: Sequence[float]) -> list[float]:
    """Return the factor by which Holm's step-down method raises each p-value; NaN values are not counted."""
    order = sorted((p, place) for place, p in enumerate(p_values) if not math.isnan(p))
    factors, largest = [1.0] * len(p_values), 0.0
    for rank, (p, place) in enumerate(order):
        left = len(order) - rank
        largest = max(largest, left * p)
        factors[place] = largest / p if p else left
    return factors


def seeds_for(difference: float, values: Sequence[float], comparisons: float = 1) -> int | None:
    """
    Return the number of seeds that detects a mean difference with 80 % power, given the spread of `values`.

    The significance level is 0.05 / `comparisons`. `None` for a difference of 0, for an unknown spread (fewer than two
    seeds, or equal values), and above 10,000 seeds.
    """
    spread = _spread(values)
    if difference == 0 or spread == 0:
        return None

    def power(count: int) -> float:
        # Of a two-sided paired t-test to detect an effect with the right sign, by the noncentral t distribution. The
        # upper tail is used, as scipy's lower tail is NaN for many large shifts
        critical = stats.t.ppf(1 - LEVEL / comparisons / 2, count - 1)
        return float(stats.nct.sf(critical, count - 1, abs(difference) / spread * math.sqrt(count)))

    counts = range(2, MOST_SEEDS + 1)
    place = bisect_left(counts, POWER, key=power)
    return counts[place] if place < len(counts) else None
