"""Means over seeds, differences paired by seed, and the number of seeds that a difference needs. Needs scipy."""

import math
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
    """Difference in final accuracy between two methods, paired by seed."""

    arm: str
    baseline: str
    mean: Mean  # its interval is corrected for several comparisons (Bonferroni)
    values: tuple[float, ...]  # one per seed
    p_value: float  # of the paired t-test, corrected for several comparisons (Holm); NaN if the spread is not known
    noise: float = 0.0  # standard deviation of a value due to the evaluation alone


def mean_over_seeds(values: Sequence[float], comparisons: int = 1, noise: float = 0.0) -> Mean:
    """
    Return the mean of one value per seed (at least one), and the half-width of its interval by Student's t.

    The level of the interval is 1 - 0.05 / `comparisons`, so that all intervals hold together with 95 % probability.
    The standard deviation over seeds is taken as at least `noise`, the standard deviation of measuring a value.
    """
    count, spread = len(values), _spread(values, noise)
    factor = stats.t.ppf(1 - LEVEL / comparisons / 2, count - 1) if spread else math.nan
    return Mean(math.fsum(values) / count, float(factor * spread / math.sqrt(count)))


def _spread(values: Sequence[float], noise: float) -> float:
    """Return the standard deviation of values, at least `noise`; 0 if not known (one value, or all equal)."""
    if len(values) < 2:
        return 0.0
    return max(noise, 0.0 if np.ptp(values) < 1e-9 else float(np.std(values, ddof=1)))


def differences(
    finals: Mapping[str, Mapping[int, float]],
    pairs: Sequence[tuple[str, str]],
    comparisons: int | None = None,
    noise: Mapping[str, float] | None = None,
) -> list[Difference]:
    """
    Return the difference between the methods of each pair, paired by seed. Pairs without a common seed are skipped.

    Intervals are corrected for `comparisons`, by default the number of pairs; p-values always for the number of pairs.
    `noise` maps methods to the standard error of an accuracy; the spread of a difference is at least both combined.
    """
    values = {}
    for arm, baseline in pairs:
        seeds = sorted(finals[arm].keys() & finals[baseline].keys())
        if seeds:
            values[arm, baseline] = tuple(finals[arm][seed] - finals[baseline][seed] for seed in seeds)
    of_pair = {pair: math.hypot(*((noise or {}).get(arm, 0.0) for arm in pair)) for pair in values}
    holm = _adjusted([_p_value(each, of_pair[pair]) for pair, each in values.items()])
    return [
        Difference(*pair, mean_over_seeds(each, comparisons or len(values), of_pair[pair]), each, p, of_pair[pair])
        for (pair, each), p in zip(values.items(), holm, strict=True)
    ]


def _p_value(values: Sequence[float], noise: float) -> float:
    """Return the p-value of a two-sided t-test of a mean of 0."""
    spread = _spread(values, noise)
    if spread == 0:
        return math.nan
    t = abs(math.fsum(values) / len(values)) / (spread / math.sqrt(len(values)))
    return float(2 * stats.t.sf(t, len(values) - 1))


def _adjusted(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected by Holm's step-down method; NaN values stay NaN and are not counted."""
    order = sorted((p, place) for place, p in enumerate(p_values) if not math.isnan(p))
    adjusted, largest = [math.nan] * len(p_values), 0.0
    for rank, (p, place) in enumerate(order):
        adjusted[place] = largest = max(largest, min(1.0, (len(order) - rank) * p))
    return adjusted


def seeds_for(difference: float, values: Sequence[float], comparisons: int = 1, noise: float = 0.0) -> int | None:
    """
    Return the number of seeds that detects a mean difference with 80 % power, given the spread of `values`.

    The significance level is 0.05 / `comparisons`; the spread is taken as at least `noise`. `None` for a difference of
    0, for an unknown spread (fewer than two seeds, or equal values), and above 10,000 seeds.
    """
    spread = _spread(values, noise)
    if difference == 0 or spread == 0:
        return None
    counts = np.arange(2, MOST_SEEDS + 1)
    # Power of a two-sided paired t-test to detect an effect with the right sign, by the noncentral t distribution. The
    # upper tail is used, as scipy's lower tail is NaN for many large shifts
    critical = stats.t.ppf(1 - LEVEL / comparisons / 2, counts - 1)
    power = stats.nct.sf(critical, counts - 1, abs(difference) / spread * np.sqrt(counts))
    enough = counts[power >= POWER]
    return int(enough[0]) if len(enough) else None
