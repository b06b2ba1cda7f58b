"""Choose the clip bounds of one optimizer update: Algorithm 1 of BAPO as pure functions over tensors.

The positive side of the policy loss depends on the upper bound alone and the negative side on the lower bound alone.
So the search needs two curves, the positive contribution over the upper grid and the negative contribution over the
lower grid. Both are sums over tokens: they add up over micro-batches and ranks, and the search is a look-up on them.

Nothing here waits for the device: no function reads a tensor value back to the host.

All bounds are in ratio space (`0.8`, `1.2`), never `1 - epsilon`. Legend: `B` rows, `T` completion tokens, `K_low` and
`K_high` grid points of the lower and upper bound.

References:
    BAPO: Stabilizing Off-Policy Reinforcement Learning for LLMs via Balanced Policy Optimization with Adaptive
    Clipping, https://huggingface.co/papers/2510.18927, Algorithm 1 and Eq. 8.
"""

from dataclasses import dataclass, replace

import torch

from .bound_grid import BoundGrid, sum_dtype


MEASURES = ("gradient", "surrogate")
SEARCH_ORDERS = ("upper_first", "lower_first")

# Tokens are summed in blocks of this size, so that intermediates stay far below a token-sized tensor.
_TOKENS_PER_BLOCK = 1 << 15


@dataclass(frozen=True)
class Contributions:
    """
    What positive- and negative-advantage tokens contribute to the policy loss, over the grid.

    Contributions of disjoint sets of tokens on the same grid add up with `+`.

    Args:
        positive (`torch.Tensor`):
            Contribution of the tokens with a positive advantage, shape `(K_high,)`, at least 0, one value for each
            upper bound.
        negative (`torch.Tensor`):
            Size of the contribution of the tokens with a negative advantage, shape `(K_low,)`, at least 0, one value
            for each lower bound.
    """

    positive: torch.Tensor
    negative: torch.Tensor

    def __add__(self, other: "Contributions") -> "Contributions":
        if self.positive.shape != other.positive.shape or self.negative.shape != other.negative.shape:
            raise ValueError("Contributions add up on the same grid only: the numbers of grid points differ.")
        return Contributions(self.positive + other.positive, self.negative + other.negative)

    def as_vector(self) -> torch.Tensor:
        """Return both curves in one tensor of shape `(K_high + K_low,)`, for one reduction over ranks."""
        return torch.cat([self.positive, self.negative])

    @classmethod
    def from_vector(cls, vector: torch.Tensor, grid: BoundGrid) -> "Contributions":
        """Return the contributions on `grid` that [`Contributions.as_vector`] packed into `vector`."""
        return cls(*vector.split([grid.num_upper, grid.num_lower]))


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


def contributions(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    grid: BoundGrid,
    measure: str = "gradient",
    delta: float | None = None,
    negative_ratio_cap: float | None = None,
) -> Contributions:
    """
    Sum what every token contributes to the policy loss, for all candidate bounds in one pass over the tokens.

    With weight `w`, importance ratio `r` and advantage `A` of a token, upper bound `h` and lower bound `l`:

        gradient:   P(h) = sum over A > 0, r <= h of w r A         N(l) = sum over A < 0, r >= l of w r |A|
        surrogate:  P(h) = sum over A > 0 of w min(r, h) A         N(l) = sum over A < 0 of w max(r, l) |A|

    Under `"gradient"`, P and N are the L1 norms of the gradient of the loss with respect to the log-probabilities,
    over positive and over negative tokens. Tokens of weight 0 or advantage 0 count nowhere, whatever their ratio. An
    empty batch gives zeros. Ratios are compared with the bounds in the type of `ratio`, as the loss does when it
    clips.

    Args:
        ratio (`torch.Tensor`):
            Importance ratios, shape `(B, T)`, or `(B, 1)` for sequence-level ratios; at least 0.
        advantages (`torch.Tensor`):
            Advantages, shape `(B,)` for one a row or `(B, T)` for one a token.
        weights (`torch.Tensor`):
            Weight that the loss gives each token, shape `(B, T)`, at least 0; 0 for padding.
        grid (`BoundGrid`):
            Candidate bounds.
        measure (`str`, *optional*, defaults to `"gradient"`):
            `"gradient"` counts the tokens whose gradient passes the clip, `"surrogate"` the value of the clipped
            term, also of clipped tokens.
        delta (`float`, *optional*):
            Cap on the unclipped ratio (TRL's two-sided clipping), at least the highest upper bound. Tokens above it
            pass no gradient; their value is that of the cap.
        negative_ratio_cap (`float`, *optional*):
            Ratio, at least 1, above which a negative token contributes as much as one at that ratio.

    Returns:
        [`Contributions`]: `.positive` of shape `(K_high,)` and `.negative` of shape `(K_low,)`, float64 where the
        device has it.

    Raises:
        ValueError: If the shapes do not go together or `measure` is unknown.

    References:
        https://huggingface.co/papers/2510.18927, Eq. 8 (the `"surrogate"` measure).

    Example:

    ```python
    >>> grid = BoundGrid(lower_start=0.5, lower_max=0.5, upper_start=1.0, upper_max=2.0, upper_step=1.0)
    >>> curves = contributions(
    ...     ratio=torch.tensor([[1.5, 0.5]]),
    ...     advantages=torch.tensor([[1.0, -1.0]]),
    ...     weights=torch.ones(1, 2),
    ...     grid=grid,
    ... )
    >>> curves.positive, curves.negative
    (tensor([0.0000, 1.5000], dtype=torch.float64), tensor([0.5000], dtype=torch.float64))

    ```
    """
    if measure not in MEASURES:
        raise ValueError(f"`measure` is {measure!r}: choose one of {', '.join(map(repr, MEASURES))}.")
    if weights.dim() != 2:
        raise ValueError(f"`weights` has shape {tuple(weights.shape)}: expected (B, T).")
    rows, length = weights.shape
    if ratio.shape not in {(rows, length), (rows, 1)}:
        raise ValueError(
            f"`ratio` has shape {tuple(ratio.shape)}: expected (B, T) = ({rows}, {length}) as `weights`, or (B, 1)."
        )
    if advantages.shape not in {(rows,), (rows, 1), (rows, length)}:
        raise ValueError(
            f"`advantages` has shape {tuple(advantages.shape)}: expected (B,) = ({rows},) or (B, T) = ({rows}, "
            f"{length})."
        )
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1)

    device, dtype = weights.device, sum_dtype(weights.device)
    upper, lower = grid.upper_on(device), grid.lower_on(device)
    num_upper, num_lower = len(upper), len(lower)

    # One histogram for both signs: slots 0 .. K_high hold positive tokens by the first upper bound that lets them
    # through, the K_low + 1 slots behind them hold negative tokens by the number of lower bounds at or below them.
    value = torch.zeros(num_upper + num_lower + 2, dtype=dtype, device=device)  # sum of w r |A| in each slot
    mass = torch.zeros_like(value)  # sum of w |A| in each slot

    flat_ratio = ratio.expand(rows, length).reshape(-1)
    flat_advantages = advantages.expand(rows, length).reshape(-1)
    flat_weights = weights.reshape(-1)
    for first in range(0, rows * length, _TOKENS_PER_BLOCK):
        block = slice(first, first + _TOKENS_PER_BLOCK)
        block_ratio, block_advantages = flat_ratio[block], flat_advantages[block]
        is_positive = block_advantages > 0
        slot = torch.where(
            is_positive,
            _count_points_below(block_ratio, grid.upper_start, grid.upper_step, num_upper, or_equal=False),
            _count_points_below(block_ratio, grid.lower_start, grid.lower_step, num_lower, or_equal=True)
            + (num_upper + 1),
        )
        token_mass = block_advantages.abs().to(dtype) * flat_weights[block]
        counted_ratio = block_ratio if delta is None else block_ratio.clamp(max=delta)
        if negative_ratio_cap is not None:
            counted_ratio = torch.where(is_positive, counted_ratio, counted_ratio.clamp(max=negative_ratio_cap))
        token_value = token_mass * counted_ratio
        counts = token_mass > 0
        if delta is not None and measure == "gradient":
            counts &= block_ratio <= delta
        # Not a product with a mask: an infinite ratio on a padded token would turn into NaN.
        value.index_add_(0, slot, torch.where(counts, token_value, 0.0))
        if measure == "surrogate":
            mass.index_add_(0, slot, token_mass)

    positive = _sum_up_to(value[: num_upper + 1])[:-1]
    negative = _sum_from(value[num_upper + 1 :])[1:]
    if measure == "surrogate":
        positive = positive + upper * _sum_from(mass[: num_upper + 1])[1:]
        negative = negative + lower * _sum_up_to(mass[num_upper + 1 :])[:-1]
    return Contributions(positive, negative)


def size_contributions(gradient_size: torch.Tensor, advantages: torch.Tensor, weights: torch.Tensor) -> Contributions:
    """
    Sum the gradients of the tokens of a loss without clip bounds: curves of one point each.

    `P = sum over A > 0 of w A size` and `N = sum over A < 0 of w |A| size`. Tokens of weight 0 or advantage 0 count
    nowhere. With a size of 1 these are the masses of both signs, the contributions at a ratio of 1.

    Args:
        gradient_size (`torch.Tensor`):
            Size of the gradient of each token at weight and advantage 1, of a shape that broadcasts with `weights`.
        advantages (`torch.Tensor`):
            Advantages, shape `(B,)`, `(B, 1)` or `(B, T)`.
        weights (`torch.Tensor`):
            Weight that the loss gives each token, shape `(B, T)`, at least 0.

    Returns:
        [`Contributions`]: `.positive` and `.negative` of shape `(1,)`.
    """
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1)
    mass = weights.to(sum_dtype(weights.device)) * advantages.abs()
    value = torch.where(mass > 0, mass * gradient_size, 0.0)
    return Contributions(
        torch.where(advantages > 0, value, 0.0).sum().reshape(1),
        torch.where(advantages < 0, value, 0.0).sum().reshape(1),
    )


def _count_points_below(
    values: torch.Tensor, start: float, step: float, num_points: int, or_equal: bool
) -> torch.Tensor:
    """
    Count the points `start + k * step`, `k < num_points`, below each value (or equal to it, if `or_equal`).

    `torch.bucketize` for an evenly spaced axis, several times faster on a CPU: the nearest point by arithmetic, then
    one comparison with that very point in the type of `values`. A NaN is below all points.
    """
    nearest = (values.to(sum_dtype(values.device)) - start).div_(step).round_()
    nearest.nan_to_num_(nan=0.0).clamp_(0, num_points - 1)
    index = nearest.int()
    point = nearest.mul_(step).add_(start).to(values.dtype)
    return index + (values >= point if or_equal else values > point)


def _sum_up_to(values: torch.Tensor) -> torch.Tensor:
    """
    Return the sums of `values` up to and with each position, shape `(K,)` as given.

    Not `cumsum`: on CUDA, torch has none that is deterministic, and raises under `full_determinism`.
    """
    position = torch.arange(len(values), device=values.device)
    return torch.where(position <= position.unsqueeze(1), values, 0.0).sum(1)


def _sum_from(values: torch.Tensor) -> torch.Tensor:
    """Return the sums of `values` from each position to the end, shape `(K,)` as given."""
    return _sum_up_to(values.flip(0)).flip(0)


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
    `P / (P + N) >= target` is taken, or the last pair where there is none. Where nothing contributes under the start
    bounds (`P + N = 0`), those are kept and the share is NaN; further on, a pair under which nothing contributes
    does not meet the target.

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
    if not 0 < target <= 1:
        raise ValueError(f"`target` is {target}: set it to a share in (0, 1].")
    if not 0 < negative_weight_min <= 1:
        raise ValueError(f"`negative_weight_min` is {negative_weight_min}: set it to a weight in (0, 1].")
    device = contributions.positive.device
    upper, lower = grid.upper_on(device), grid.lower_on(device)
    if contributions.positive.shape != upper.shape or contributions.negative.shape != lower.shape:
        raise ValueError(
            f"The contributions have {len(contributions.positive)} upper and {len(contributions.negative)} lower "
            f"points, the grid has {len(upper)} and {len(lower)}: compute them on the same grid."
        )

    last_upper, last_lower = len(upper) - 1, len(lower) - 1
    last_step = last_upper + last_lower
    position = torch.arange(last_step + 1, device=device)
    if order == "upper_first":
        upper_index, lower_index = position.clamp(max=last_upper), (position - last_upper).clamp(min=0)
    else:
        upper_index, lower_index = (position - last_lower).clamp(min=0), position.clamp(max=last_lower)

    positive, negative = contributions.positive.take(upper_index), contributions.negative.take(lower_index)
    share = positive / (positive + negative)  # NaN where nothing contributes
    met = share >= target
    first_met = met.int().argmax()
    step = torch.where(met.any(), first_met, last_step)
    step = torch.where(share[0].isnan(), 0, step)
    weight, final_share, final_met = torch.ones_like(share[0]), share.take(step), met.take(step)
    if negative_weight_min < 1:
        positive, negative = positive.take(step), negative.take(step)
        exact = positive * (1 - target) / (target * negative)
        may_weigh = ~final_met & (negative > 0)
        weight = torch.where(may_weigh, exact.clamp(negative_weight_min, 1.0), weight)
        final_share = positive / (positive + weight * negative)
        final_met = final_met | (may_weigh & (exact >= negative_weight_min) & (positive > 0))
    return ClipBounds(
        low=lower.take(lower_index.take(step)),
        high=upper.take(upper_index.take(step)),
        positive_share=final_share,
        initial_positive_share=share[0],
        target_met=final_met,
        steps=step,
        negative_weight=weight,
    )


def share_under(bounds: ClipBounds, contributions: Contributions, grid: BoundGrid, target: float) -> ClipBounds:
    """
    Return `bounds`, chosen for other curves, with the shares that they and their weight have on these.

    Args:
        bounds ([`ClipBounds`]):
            Bounds on `grid`, and a weight of negative tokens.
        contributions ([`Contributions`]):
            Curves on `grid`, summed over all tokens of the update.
        grid ([`BoundGrid`]):
            Candidate bounds.
        target (`float`):
            Share of the policy loss that positive tokens are to contribute.
    """
    upper_index = ((bounds.high - grid.upper_start) / grid.upper_step).round().long()
    lower_index = ((bounds.low - grid.lower_start) / grid.lower_step).round().long()
    positive = contributions.positive.take(upper_index)
    negative = contributions.negative.take(lower_index)
    share = positive / (positive + bounds.negative_weight * negative)
    first_positive, first_negative = contributions.positive[0], contributions.negative[0]
    return replace(
        bounds,
        positive_share=share,
        initial_positive_share=first_positive / (first_positive + first_negative),
        target_met=share >= target * (1 - 1e-9),  # a weight meets it but for rounding
    )
