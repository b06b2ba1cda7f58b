"""Growth in measurements that a few outliers do not move."""

from itertools import combinations
from statistics import median


def growth(values: list[float], num_bins: int = 20) -> float:
    """
    Return by how much values grow from their first to their last: the median slope between any two of the medians of
    `num_bins` stretches (Theil-Sen), times the length.
    """
    size = len(values) // num_bins
    medians = [median(values[start : start + size]) for start in range(0, num_bins * size, size)]
    slopes = [(b - a) / (j - i) for (i, a), (j, b) in combinations(enumerate(medians), 2)]
    return median(slopes) * num_bins
