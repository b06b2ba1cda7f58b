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
    """A mean over seeds, and half the width of its 95 % interval; NaN where the spread is not known."""

    value: float
    half_width: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of 0."""
        return abs(self.value) > self.half_width


@dataclass(frozen=True)
class Difference:
    """How far an arm ends above another, paired by seed."""

    arm: str
    baseline: str
    mean: Mean  # with an interval that holds for all comparisons at once (Bonferroni)
    values: tuple[float, ...]  # one of each seed
    p_value: float  # of the paired t-test, adjusted for the number of comparisons (Holm); NaN without a known spread
    noise: float = 0.0  # standard deviation of a value that the evaluation alone causes


def mean_over_seeds(values: Sequence[float], comparisons: int = 1, noise: float = 0.0) -> Mean:
    """
    Return the mean of values, one of each seed, at least one, and half the width of its interval, by Student's t.

    `comparisons` intervals are to hold all at once, with a probability of 95 %: each is widened to 1 - 0.05 / that.
    The spread of the seeds counts as at least `noise`, the standard deviation that measuring a value causes.
    """
    count, spread = len(values), _spread(values, noise)
    factor = stats.t.ppf(1 - LEVEL / comparisons / 2, count - 1) if spread else math.nan
    return Mean(math.fsum(values) / count, float(factor * spread / math.sqrt(count)))


def _spread(values: Sequence[float], noise: float) -> float:
    """Return the standard deviation of values, at least `noise`; 0 where it is not known: of one, or all alike."""
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
    Compare arms, seed by seed: the first of each pair with the second. A pair without a common seed is left out.

    Intervals are widened for `comparisons`, by default the number of pairs; p-values always for that number. `noise`
    has the standard error of an accuracy of each arm: a difference of two counts as at least as noisy as both.
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
    """Return the p-value of a t-test of a mean of 0, two-sided."""
    spread = _spread(values, noise)
    if spread == 0:
        return math.nan
    t = abs(math.fsum(values) / len(values)) / (spread / math.sqrt(len(values)))
    return float(2 * stats.t.sf(t, len(values) - 1))


def _adjusted(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for their number, by Holm's step-down method; NaN stays, and does not count."""
    order = sorted((p, place) for place, p in enumerate(p_values) if not math.isnan(p))
    adjusted, largest = [math.nan] * len(p_values), 0.0
    for rank, (p, place) in enumerate(order):
        adjusted[place] = largest = max(largest, min(1.0, (len(order) - rank) * p))
    return adjusted


def seeds_for(difference: float, values: Sequence[float], comparisons: int = 1, noise: float = 0.0) -> int | None:
    """
    Return how many seeds show a mean difference with a probability of 80 %, at the spread of those on some seeds.

    The level is 0.05 over the `comparisons` at once; the spread counts as at least `noise`. `None` for a difference of
    0, where the spread is not known (fewer than two seeds, or seeds that all agree), and beyond 10,000 seeds.
    """
    spread = _spread(values, noise)
    if difference == 0 or spread == 0:
        return None
    counts = np.arange(2, MOST_SEEDS + 1)
    # Power of a two-sided paired t-test to show an effect by its sign: noncentral t distribution. By the upper tail,
    # as scipy's lower one is NaN for many large shifts
    critical = stats.t.ppf(1 - LEVEL / comparisons / 2, counts - 1)
    power = stats.nct.sf(critical, counts - 1, abs(difference) / spread * np.sqrt(counts))
    enough = counts[power >= POWER]
    return int(enough[0]) if len(enough) else None
