"""What a run took to reach an accuracy: seconds, generated tokens and updates."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any


COSTS = ("seconds", "tokens", "updates")


def cost_to_target(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    """
    Return the cost at which a curve reaches an accuracy that the next measurement confirms, or `None`.

    Args:
        curve (`Sequence[tuple[float, float]]`):
            Cost and accuracy of each measurement, in order. Between two measurements, the accuracy is on a line.
        target (`float`):
            Accuracy to reach.
    """
    before: tuple[float, float] | None = None
    for (cost, accuracy), (_, confirmed) in itertools.pairwise(curve):
        if min(accuracy, confirmed) >= target:
            if before is None or before[1] >= target:
                return cost if before is None else before[0]
            return before[0] + (target - before[1]) / (accuracy - before[1]) * (cost - before[0])
        before = cost, accuracy
    return None


def to_target(
    curve: Sequence[tuple[int, float]], costs: Sequence[Mapping[str, float | None]], target: float, clock: str
) -> dict[str, Any]:
    """
    Return `seconds`, `tokens` and `updates` of a run until it reached the target, and whether it `reached` it.

    A run that did not reach it has the costs of the whole run, a lower bound. `costs` has the `wall` and `cpu` seconds
    and the generated `tokens` up to each measurement of the `curve`; `clock` is one of the first two.
    """
    columns: dict[str, list[float | None]] = {
        "seconds": [cost.get(clock) for cost in costs],
        "tokens": [cost.get("tokens") for cost in costs],
        "updates": [step for step, _ in curve],
    }
    found: dict[str, Any] = {"target": target, "clock": clock, "reached": cost_to_target(curve, target) is not None}
    for name, column in columns.items():
        known = [(value, accuracy) for value, (_, accuracy) in zip(column, curve, strict=False) if value is not None]
        found[name] = None
        if known and len(known) == len(curve):
            reached = cost_to_target(known, target)
            found[name] = round(known[-1][0] if reached is None else reached, 3)
    return found
