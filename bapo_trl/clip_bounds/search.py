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

# A share that misses the target by less, relative to the target, meets it. The last bits of a sum depend on the device
# and on how the tokens are split over micro-batches and ranks. A tie must not: with ratios of 1 and as many right as
# wrong samples, the share is 0.5 in whatever order.
_ROUNDING = 1e-11


@dataclass(frozen=True)
class ClipBounds:
    """
    Outcome of one search. All fields are 0-dim tensors on the device of the contributions.

    Args:
        low (`torch.Tensor`):
            Lower clip bound in ratio space.
        high (`torch.Tensor`):
            Upper clip bound in ratio space.
        positive_share (`torch.Tensor`):
            Share `P / (P + w N)` of the positive tokens under the chosen bounds and weight `w`, in [0, 1]; NaN where
            no token contributes.
        initial_positive_share (`torch.Tensor`):
            The same share under the start bounds, with negative tokens at full weight.
        target_met (`torch.Tensor`):
            Boolean, whether `positive_share` reached the target.
        steps (`torch.Tensor`):
            Integer, number of times a bound moved.
        negative_weight (`torch.Tensor`):
            Weight of the negative tokens in the policy loss, in (0, 1]; 1 where the bounds alone reach the target.
    """

    low: torch.Tensor
    high: torch.Tensor
    positive_share: torch.Tensor
    initial_positive_share: torch.Tensor
    target_met: torch.Tensor
    steps: torch.Tensor
    negative_weight: torch.Tensor


def search_bounds(
    contributions: Contributions,
    grid: BoundGrid,
    target: float,
    order: str = "upper_first",
    negative_weight_min: float = 1.0,
) -> ClipBounds:
    """
    Walk from the start bounds until the positive share reaches the target; weigh negative tokens down for the rest.

    The path goes to the end of one bound's axis before it moves the other; the first pair on it with
    `P / (P + N) >= target` is taken (less 1e-11 of the target, for rounding), or the last pair where there is none.
    Where nothing contributes under the start bounds (`P + N = 0`), those are kept and the share is NaN; further on, a
    pair under which nothing contributes does not meet the target.

    Where no pair meets it, the weight `w = P (1 - target) / (target N)` of negative tokens does, `P / (P + w N) =
    target`. It is kept in [`negative_weight_min`, 1]: the smallest where `P = 0`, 1 where `N = 0`.

    Args:
        contributions ([`Contributions`]):
            Curves on `grid`, summed over all tokens of the update.
        grid ([`BoundGrid`]):
            Candidate bounds.
        target (`float`):
            Share of the policy loss that positive tokens are to contribute, in (0, 1].
        order (`str`, *optional*, defaults to `"upper_first"`):
            `"upper_first"` raises the upper bound to its end before the lower one moves, `"lower_first"` the other
            way round.
        negative_weight_min (`float`, *optional*, defaults to `1.0`):
            Smallest weight of negative tokens, in (0, 1]. With 1 there is no weight, as in the paper.

    Returns:
        [`ClipBounds`]: 0-dim tensors on the device of the contributions; nothing is read back to the host.

    Raises:
        ValueError: If `order` is unknown, `target` or `negative_weight_min` is outside (0, 1] or the curves are not
            those of `grid`.

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
    goal = target * (1 - _ROUNDING)
    ends = share >= goal
    ends[:1].logical_or_(share[:1].isnan())
    ends[-1:].fill_(True)
    step = ends.view(torch.uint8).argmax()  # the first that is true
    high, low, positive, negative = path.index_select(1, step.reshape(1)).squeeze(1).unbind()
    final_share, weight = share.take(step), torch.ones_like(high)
    met = final_share >= goal
    if negative_weight_min < 1:
        exact = positive * (1 - target) / (target * negative)  # NaN where nothing contributes
        weight = torch.where(met, weight, torch.fmin(exact, weight).clamp(min=negative_weight_min))
        final_share = positive / (positive + weight * negative)
        met = met | (exact >= negative_weight_min)
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
    """Return the parts of two rows: the values at the upper and at the lower bound, at each step of the path."""
    upper, lower = values
    if order == "upper_first":
        return [upper, upper[-1:].expand(len(lower) - 1), lower[:1].expand(len(upper) - 1), lower]
    return [upper[:1].expand(len(lower) - 1), upper, lower, lower[-1:].expand(len(upper) - 1)]


def share_under(bounds: ClipBounds, contributions: Contributions, grid: BoundGrid) -> ClipBounds:
    """
    Return `bounds`, chosen for other curves, with the shares that they and their weight have on these.

    Whether the target was met stays what the search said: a forecast that aims at it scatters around it.
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
