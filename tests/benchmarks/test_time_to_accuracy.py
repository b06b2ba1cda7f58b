"""The tables of the study of time to accuracy, on runs of which the answer is known."""

import pytest

from benchmarks.time_to_accuracy import mean_until


@pytest.mark.parametrize(
    ("end", "mean"),
    [(10, 0.2), (20, (0.2 * 10 + 0.45 * 10) / 20), (30, (0.2 * 10 + 0.45 * 20) / 30), (5, 0.15)],
)
def test_the_mean_of_a_curve_up_to_a_time(end, mean):
    curve = [(0.0, 0.1), (10.0, 0.3), (20.0, 0.6), (30.0, 0.3)]
    assert mean_until(curve, end) == pytest.approx(mean)
