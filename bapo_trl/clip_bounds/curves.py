"""Pure: what the tokens contribute to the policy loss under each candidate bound.

The positive side of the policy loss depends on the upper bound alone and the negative side on the lower bound alone.
So the search needs two curves, the positive contribution over the upper grid and the negative contribution over the
lower grid. Both are sums over tokens: they add up over micro-batches and ranks, and the search is a look-up on them.

Nothing here waits for the device: no function reads a tensor value back to the host.

All bounds are in ratio space (`0.8`, `1.2`), never `1 - epsilon`. Legend: `B` rows, `T` completion tokens, `K_low` and
`K_high` grid points of the lower and upper bound.

References:
    https://huggingface.co/papers/2510.18927, Eq. 8.
"""

from dataclasses import dataclass

import torch

from .grid import BoundGrid, sum_dtype


MEASURES = ("gradient", "surrogate")

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


def contributions(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    grid: BoundGrid,
    measure: str = "gradient",
    delta: float | None = None,
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

    `P = sum over A > 0 of w A size` and `N = sum over A < 0 of w |A| size`. The size is that at weight and advantage
    1, of a shape that broadcasts with the weights, `(B, T)`; advantages are `(B,)`, `(B, 1)` or `(B, T)`. Tokens of
    weight 0 or advantage 0 count nowhere. With a size of 1 these are the masses of both signs, the contributions at a
    ratio of 1.
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
