"""
Choose the clip bounds of one optimizer update, Algorithm 1 of BAPO, as a look-up on the curves.

No function reads a tensor value back to the host. All bounds are in ratio space.
"""

from dataclasses import dataclass, replace

import torch

from .curves import Contributions
from .grid import BoundGrid


SEARCH_ORDERS = ("upper_first", "lower_first")
SCOPES = ("batch", "micro_batch", "carried_over")

# Smallest difference of positive contributions that counts. At ratios of 1, whole groups have a contribution of
# exactly 0.5, the default target, which float32 advantages miss by about 1e-7: rounding would choose the bounds.
_TOLERANCE = 1e-3


@dataclass(frozen=True)
class ClipBounds:
    """Result of one search. All fields are 0-dim tensors on the device of the contributions."""

    low: torch.Tensor  # clip bounds, in ratio space
    high: torch.Tensor
    positive_share: torch.Tensor  # `P / (P + w N)` under these bounds and the weight `w`; NaN if no token contributes
    initial_positive_share: torch.Tensor  # the same under the start bounds, with negative tokens at full weight
    target_met: torch.Tensor  # boolean: whether `positive_share` reached the target, less 1e-3
    steps: torch.Tensor  # integer: number of times a bound moved
    negative_weight: torch.Tensor  # of negative tokens in the policy loss, in (0, 1]


def search_bounds(
    contributions: Contributions,
    grid: BoundGrid,
    target: float,
    order: str = "upper_first",
    negative_weight_min: float = 1.0,
) -> ClipBounds:
    """
    Raise the clip bounds until the positive contribution reaches the target; else scale down the negative tokens.

    The search raises one bound to its maximum before it moves the other. It takes the first pair of bounds with
    `P / (P + N) >= target - 1e-3`, or the last pair if there is none. If no token contributes under the start bounds
    (`P + N = 0`), the start bounds are kept and the share is NaN. Any later pair without a contributing token does not
    meet the target. Unlike in Algorithm 1, the start bounds are also kept if the shares under the first and the last
    pair differ by at most 1e-3: the bounds have no effect then.

    If the chosen pair misses the target, negative tokens get the weight `w = P (1 - target) / (target N)`, with which
    `P / (P + w N) = target`. It is limited to [`negative_weight_min`, 1]: the minimum if `P = 0`, 1 if `N = 0`.

    Args:
        contributions ([`Contributions`]): Curves on `grid`, summed over all tokens of the update.
        grid ([`BoundGrid`]): Candidate bounds.
        target (`float`): Fraction of the policy loss that should come from positive tokens, in (0, 1].
        order (`str`): `"upper_first"` or `"lower_first"`: which bound moves to its maximum before the other.
        negative_weight_min (`float`): Smallest weight of negative tokens, in (0, 1]; 1 as in the paper.

    Raises:
        ValueError: If `order` is unknown, `target` or `negative_weight_min` is outside (0, 1] or the curves have
            other numbers of points than `grid`.

    References:
        https://huggingface.co/papers/2510.18927, Algorithm 1.

    Example:

    ```python
    >>> grid = BoundGrid(lower_start=0.5, lower_max=0.5, upper_start=1.0, upper_max=2.0, upper_step=1.0)
    >>> curves = Contributions(positive=torch.tensor([0.0, 1.5]), negative=torch.tensor([0.5]))
    >>> bounds = search_bounds(curves, grid, target=0.5)
    >>> bounds.high.item(), bounds.positive_share.item(), bounds.steps.item()
    (2.0, 0.75, 1)

    ```
    """
    if order not in SEARCH_ORDERS:
        raise ValueError(f"`order` is {order!r}: choose one of {', '.join(map(repr, SEARCH_ORDERS))}.")
    for name, value in (("target", target), ("negative_weight_min", negative_weight_min)):
        if not 0 < value <= 1:
            raise ValueError(f"`{name}` is {value}: set it to a value in (0, 1].")
    device = contributions.positive.device
    upper, lower = grid.upper_on(device), grid.lower_on(device)
    if contributions.positive.shape != upper.shape or contributions.negative.shape != lower.shape:
        raise ValueError(
            f"The contributions have {len(contributions.positive)} upper and {len(contributions.negative)} lower "
            f"points, the grid has {len(upper)} and {len(lower)}: compute them on the same grid."
        )

    rows = _path((upper, lower), order) + _path((contributions.positive, contributions.negative), order)
    path = torch.cat(rows).view(4, -1)  # upper bound, lower bound, P and N at each step
    share = path[2] / (path[2] + path[3])  # NaN where nothing contributes
    goal = target - _TOLERANCE
    ends = share >= goal
    has_no_effect = (share[-1:] - share[:1]).abs() <= _TOLERANCE
    ends[:1].logical_or_(share[:1].isnan() | has_no_effect)
    ends[-1:].fill_(True)
    step = ends.view(torch.uint8).argmax()  # the first that is true
    high, low, positive, negative = path.index_select(1, step.reshape(1)).squeeze(1).unbind()
    final_share, weight = share.take(step), torch.ones_like(high)
    met = final_share >= goal
    if negative_weight_min < 1:
        exact = positive * (1 - target) / (target * negative)  # NaN where nothing contributes
        weight = torch.where(met, weight, torch.fmin(exact, weight).clamp(min=negative_weight_min))
        final_share = positive / (positive + weight * negative)
        met = final_share >= goal
    return ClipBounds(
        low=low,
        high=high,
        positive_share=final_share,
        initial_positive_share=share[0],
        target_met=met,
        steps=step,
        negative_weight=weight,
    )


def _path(values: tuple[torch.Tensor, torch.Tensor], order: str) -> list[torch.Tensor]:
    """Return the values at the upper bound, then at the lower bound, for each step of the path, in two parts each."""
    upper, lower = values
    if order == "upper_first":
        return [upper, upper[-1:].expand(len(lower) - 1), lower[:1].expand(len(upper) - 1), lower]
    return [upper[:1].expand(len(lower) - 1), upper, lower, lower[-1:].expand(len(upper) - 1)]


def share_under(bounds: ClipBounds, contributions: Contributions, grid: BoundGrid) -> ClipBounds:
    """
    Return `bounds`, which were chosen for other curves, with their positive contributions on the given curves.

    `target_met` stays the result of the search: with bounds from a forecast, the contribution scatters around the
    target.
    """
    upper_index = ((bounds.high - grid.upper_start) / grid.upper_step).round().long()
    lower_index = ((bounds.low - grid.lower_start) / grid.lower_step).round().long()
    positive, negative = contributions.positive.take(upper_index), contributions.negative.take(lower_index)
    first_positive, first_negative = contributions.positive[0], contributions.negative[0]
    return replace(
        bounds,
        positive_share=positive / (positive + bounds.negative_weight * negative),
        initial_positive_share=first_positive / (first_positive + first_negative),
    )
