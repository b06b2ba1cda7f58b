"""Slow and obvious versions of the search: what the fast one is held against."""

import math

from bapo_trl.clip_bounds import ClipBounds


def token_contributions(tokens, low: float, high: float, measure: str) -> tuple[float, float]:
    """P and N of a list of (ratio, advantage, weight), one token after the other."""
    positive, negative = [], []
    for ratio, advantage, weight in tokens:
        if measure == "gradient":
            if advantage > 0 and ratio <= high:
                positive.append(weight * ratio * advantage)
            if advantage < 0 and ratio >= low:
                negative.append(weight * ratio * -advantage)
        else:
            if advantage > 0:
                positive.append(weight * min(ratio, high) * advantage)
            if advantage < 0:
                negative.append(weight * max(ratio, low) * -advantage)
    return math.fsum(positive), math.fsum(negative)


TOLERANCE = 1e-3


def search(tokens, grid, target: float, measure: str, order: str, weight_min: float = 1.0) -> ClipBounds:
    """
    Algorithm 1 in numbers: move one bound by one step until the share is reached, less a tolerance, or none can move.
    Unlike there, bounds that change the share by no more than the tolerance stay. Then weigh negative tokens down, by
    bisection.
    """
    uppers, lowers = grid.upper.tolist(), grid.lower.tolist()
    i, j, steps, weight = 0, 0, 0, 1.0

    def share() -> float:
        positive, negative = token_contributions(tokens, lowers[j], uppers[i], measure)
        negative *= weight
        return positive / (positive + negative) if positive + negative > 0 else math.nan

    i, j = len(uppers) - 1, len(lowers) - 1
    widest = share()
    i = j = 0
    initial = rho = share()
    if not math.isnan(initial) and not abs(widest - initial) <= TOLERANCE:
        while not rho >= target - TOLERANCE:
            upper_can_move, lower_can_move = i + 1 < len(uppers), j + 1 < len(lowers)
            if not upper_can_move and not lower_can_move:
                break
            if upper_can_move and (order == "upper_first" or not lower_can_move):
                i += 1
            else:
                j += 1
            steps += 1
            rho = share()
    met = rho >= target - TOLERANCE
    if rho < target - TOLERANCE and token_contributions(tokens, lowers[j], uppers[i], measure)[1] > 0:
        weight = weight_min
        met = share() >= target - TOLERANCE
        if share() >= target:  # the share falls with the weight
            smallest, largest = weight_min, 1.0
            for _ in range(60):
                weight = (smallest + largest) / 2
                smallest, largest = (weight, largest) if share() >= target else (smallest, weight)
            weight = smallest
    return ClipBounds(lowers[j], uppers[i], share(), initial, met, steps, weight)
