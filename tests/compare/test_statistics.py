"""Means, paired differences and numbers of seeds, against values by hand and against slow, simple versions."""

import math
import statistics

import numpy as np
import pytest
from scipy import stats

from bapo_trl.compare.statistics import differences, mean_over_seeds, seeds_for


def test_an_interval_is_students():
    mean = mean_over_seeds([0.5, 0.6, 0.8, 0.7, 0.4])
    # s = 0.158114, t(4) at 0.975 = 2.776445: 2.776445 * 0.158114 / sqrt(5) = 0.196324
    assert (mean.value, mean.half_width) == (pytest.approx(0.6), pytest.approx(0.196324, abs=1e-6))
    widened = mean_over_seeds([0.5, 0.6, 0.8, 0.7, 0.4], comparisons=3)
    # t(4) at 1 - 0.05 / 6 = 3.961 (tables): 0.2801
    assert widened.half_width == pytest.approx(0.2801, abs=1e-4)


@pytest.mark.parametrize("values", [[0.3], [0.3, 0.3], [0.1 + 0.2, 0.3]])
def test_equal_seeds_have_an_unknown_spread(values):
    mean = mean_over_seeds(values)
    assert math.isnan(mean.half_width)
    assert not mean.excludes_zero


def test_differences_are_paired_by_seed():
    finals = {"A": {0: 0.5, 1: 0.6, 2: 0.7}, "B": {0: 0.55, 1: 0.67, 3: 0.1}, "C": {7: 1.0}}
    (b,) = differences(finals, [("B", "A"), ("C", "A")])  # C shares no seed
    assert b.values == (pytest.approx(0.05), pytest.approx(0.07))
    assert b.mean.value == pytest.approx(0.06)


@pytest.mark.parametrize("seed", range(5))
def test_intervals_and_p_values_are_holms(seed):
    rng = np.random.default_rng(seed)
    finals = {"A": dict.fromkeys(range(8), 0.0)}
    for arm, effect in {"B": 0.05, "C": 0.03, "D": 0.02, "E": 0.0}.items():
        finals[arm] = {seed: effect + 0.03 * float(rng.normal()) for seed in range(8)}
    found = differences(finals, [(arm, "A") for arm in "BCDE"])
    plain = [stats.ttest_1samp(each.values, 0).pvalue for each in found]
    order = sorted(range(4), key=plain.__getitem__)
    holm, largest = [0.0] * 4, 0.0
    for rank, place in enumerate(order):  # each times the number of hypotheses that are left, and never falling
        largest = max(largest, (4 - rank) * plain[place])
        holm[place] = largest
    assert [each.p_value for each in found] == pytest.approx([min(1.0, p) for p in holm])
    for each, p, corrected in zip(found, plain, holm, strict=True):
        error = statistics.stdev(each.values) / math.sqrt(8)
        factor = corrected / p
        assert each.mean.half_width == pytest.approx(stats.t.ppf(1 - 0.05 / factor / 2, 7) * error)
        assert each.mean.excludes_zero == (each.p_value < 0.05)
    # No interval is wider than Bonferroni's, and that of the smallest p-value is as wide
    first = found[order[0]]
    error = statistics.stdev(first.values) / math.sqrt(8)
    assert first.mean.half_width == pytest.approx(stats.t.ppf(1 - 0.05 / 8, 7) * error)
    assert all(1 <= each.comparisons <= 4 + 1e-9 for each in found)


def test_a_pair_of_unknown_spread_is_not_counted():
    finals = {"A": {0: 0.5, 1: 0.5, 2: 0.5}, "B": {0: 0.6, 1: 0.7, 2: 0.65}, "C": {0: 0.6, 1: 0.6, 2: 0.6}}
    b, c = differences(finals, [("B", "A"), ("C", "A")])
    assert math.isnan(c.p_value)
    assert math.isnan(c.mean.half_width)
    assert b.p_value == pytest.approx(stats.ttest_1samp(b.values, 0).pvalue)


# Paired two-sided t-tests at 0.05 with a power of 0.8, as tables of the noncentral t distribution have them
@pytest.mark.parametrize(("effect", "count"), [(0.2, 199), (0.5, 34), (0.8, 15), (1.0, 10), (-1.0, 10), (5.8, 3)])
def test_the_number_of_seeds_has_the_power(effect, count):
    values = [1.0, -1.0]  # of standard deviation sqrt(2)
    assert seeds_for(effect * math.sqrt(2), values) == count


def test_an_unknown_number_of_seeds_is_none():
    assert seeds_for(0.03, [0.1]) is None
    assert seeds_for(0.0, [0.1, 0.2]) is None
    assert seeds_for(1e-6, [1.0, -1.0]) is None
