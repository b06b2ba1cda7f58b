"""
Contribution curves: how much the tokens contribute to the policy loss under each candidate bound.

The positive side of the policy loss depends on the upper bound alone and the negative side on the lower bound alone.
So the search needs two curves, the positive contribution over the upper grid and the negative contribution over the
lower grid. Both are sums over tokens: they add up over micro-batches and ranks.

No function reads a tensor value back to the host. All bounds are in ratio space (`0.8`, `1.2`), never `1 - epsilon`.
Legend: `B` samples, `T` completion tokens, `K_low` and `K_high` grid points of the lower and upper bound.
"""

from dataclasses import dataclass
from functools import lru_cache, reduce

import torch
from torch.nn.functional import embedding_bag

from .grid import BoundGrid, sum_dtype


MEASURES = ("gradient", "surrogate")

# An accelerator sums up to this many tokens in one call, and more in two: a call allocates an integer per token beside
# its result, and two calls keep all intermediates within four token-sized tensors.
_TOKENS_PER_CALL = 1 << 16


@dataclass(frozen=True)
class Contributions:
    """
    Contributions of positive- and negative-advantage tokens to the policy loss, for each bound; at least 0.

    Add the contributions of disjoint sets of tokens on the same grid with `+`.
    """

    positive: torch.Tensor  # `(K_high,)`, for each upper bound
    negative: torch.Tensor  # size, `(K_low,)`, for each lower bound

    def __add__(self, other: "Contributions") -> "Contributions":
        return Contributions(self.positive + other.positive, self.negative + other.negative)

    def __mul__(self, totals: "Contributions") -> "Contributions":
        """Return each curve times the total of its sign."""
        return Contributions(self.positive * totals.positive, self.negative * totals.negative)

    def over(self, totals: "Contributions", otherwise: "Contributions") -> "Contributions":
        """Return each curve divided by the total of its sign, or the curve of `otherwise` if the total is 0."""
        return Contributions(
            torch.where(totals.positive > 0, self.positive / totals.positive, otherwise.positive),
            torch.where(totals.negative > 0, self.negative / totals.negative, otherwise.negative),
        )

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
    Sum the contributions of all tokens to the policy loss, for all candidate bounds in one pass over the tokens.

    With weight `w`, importance ratio `r` and advantage `A` of a token, upper bound `h` and lower bound `l`:

        gradient:   P(h) = sum over A > 0, r <= h of w r A         N(l) = sum over A < 0, r >= l of w r |A|
        surrogate:  P(h) = sum over A > 0 of w min(r, h) A         N(l) = sum over A < 0 of w max(r, l) |A|

    Under `"gradient"`, P and N are the L1 norms of the gradient of the loss with respect to the log-probabilities,
    over positive and over negative tokens. Tokens of weight 0 or advantage 0 are ignored, whatever their ratio; the
    ratios of other tokens must not be NaN. An empty batch gives zeros. Ratios are compared with the bounds in the type
    of `ratio`, as in the loss, so that the same tokens are clipped on every device. The sums differ between devices in
    the last bits, by the order of addition.

    Args:
        ratio (`torch.Tensor`): Importance ratios, at least 0, `(B, T)`, or `(B, 1)` for sequence-level ratios.
        advantages (`torch.Tensor`): One per sample, `(B,)`, or per token, `(B, T)`.
        weights (`torch.Tensor`): Weight that the loss gives each token, `(B, T)`, at least 0; 0 for padding.
        grid ([`BoundGrid`]): Candidate bounds.
        measure (`str`): `"gradient"` or `"surrogate"`, as in https://huggingface.co/papers/2510.18927, Eq. 8.
        delta (`float`, *optional*): Cap on the unclipped ratio (TRL's two-sided clipping), at least the highest upper
            bound. Tokens above it have no gradient; their surrogate value is computed at the cap.

    Returns:
        [`Contributions`]: float64 where the device has it.

    Raises:
        ValueError: If the shapes do not match or `measure` is unknown.

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
    for name, tensor, shapes in (
        ("ratio", ratio, [(rows, length), (rows, 1)]),
        ("advantages", advantages, [(rows,), (rows, 1), (rows, length)]),
    ):
        if tensor.shape not in shapes:
            raise ValueError(f"`{name}` has shape {tuple(tensor.shape)}: expected one of {shapes}, as `weights`.")
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1)

    device, dtype = weights.device, sum_dtype(weights.device)
    terms = weights.to(dtype, copy=True).mul_(advantages).abs_()  # w |A|
    if measure == "surrogate":
        slots = _slots(ratio, advantages, weights.shape, grid)
        clipped = _sum_rows(_clipped_table(grid, device), slots, terms)
        terms.mul_(ratio if delta is None else ratio.clamp(max=delta))
    else:
        clipped = None
        terms.mul_(ratio)
        if delta is not None:
            terms.masked_fill_(ratio > delta, 0.0)
        # Computed after the multiplication, for which a CPU needs the memory of two token-sized tensors
        slots = _slots(ratio, advantages, weights.shape, grid)
    # Now w r |A|. Weight 0 x infinity is NaN, and the table may multiply an infinity by 0: make both finite.
    terms.nan_to_num_(nan=0.0, posinf=torch.finfo(dtype).max ** 0.5)
    sums = _sum_rows(_passed_table(grid, device), slots, terms)
    if clipped is not None:
        sums += clipped
    return Contributions(sums[grid.num_lower + 1 :], sums[: grid.num_lower].flip(0))


def size_contributions(gradient_size: torch.Tensor, advantages: torch.Tensor, weights: torch.Tensor) -> Contributions:
    """
    Sum the gradient sizes of a loss without clip bounds, as curves of one point each.

    `P = sum over A > 0 of w A size` and `N = sum over A < 0 of w |A| size`, for a size at weight and advantage 1 that
    broadcasts with the weights, `(B, T)`, and advantages `(B,)`, `(B, 1)` or `(B, T)`. Tokens of weight 0 or advantage
    0 are ignored. With a size of 1, the results are the total absolute advantages of both signs.
    """
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1)
    terms = weights.to(sum_dtype(weights.device), copy=True).mul_(advantages)
    counts_nowhere = terms == 0
    terms.mul_(gradient_size).masked_fill_(counts_nowhere, 0.0)
    positive = terms.clamp(min=0).sum()
    return Contributions(positive.reshape(1), terms.clamp_(max=0).sum().abs().reshape(1))


# The bounds of both signs are one ascending list: -lower bounds, 0, upper bounds. A token's ratio, with the sign of
# its advantage, has a slot in the list: the number of bounds below the ratio. A bound that is not below the ratio lets
# the token through. The 0 separates negative tokens, in slots 0 .. K_low, from positive tokens in the slots behind.


@lru_cache(maxsize=16)
def _signed_bounds(grid: BoundGrid, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return the list of both signs, shape `(K_low + 1 + K_high,)`. Shared: do not write."""
    lower, upper = grid.lower_on(device), grid.upper_on(device)
    return torch.cat([-lower.flip(0), lower.new_zeros(1), upper]).to(dtype)


@lru_cache(maxsize=16)
def _passed_table(grid: BoundGrid, device: torch.device) -> torch.Tensor:
    """Return 1 where a bound (column) lets a token of a slot (row) of its sign through, else 0. Shared."""
    num_bounds, num_negative = grid.num_lower + 1 + grid.num_upper, grid.num_lower + 1
    table = torch.ones(num_bounds + 1, num_bounds, dtype=sum_dtype(device), device=device).triu_()
    table[:num_negative, num_negative:] = 0
    return table


@lru_cache(maxsize=16)
def _clipped_table(grid: BoundGrid, device: torch.device) -> torch.Tensor:
    """Return the bound (column) where it clips the ratio of a token of a slot (row) of its sign, else 0. Shared."""
    num_negative = grid.num_lower + 1
    bounds = _signed_bounds(grid, device, sum_dtype(device)).abs()
    table = bounds.expand(len(bounds) + 1, -1).tril(-1)
    table[num_negative:, :num_negative] = 0
    return table


def _slots(ratio: torch.Tensor, advantages: torch.Tensor, shape: torch.Size, grid: BoundGrid) -> torch.Tensor:
    """Return the slot of each token, int32, `(B * T,)`; `shape` is `(B, T)`, which the other two broadcast to."""
    signed = ratio.clamp(min=torch.finfo(ratio.dtype).tiny).copysign(advantages)  # 0 has no sign in a comparison
    bounds = _signed_bounds(grid, ratio.device, ratio.dtype)  # rounded as in the loss, which compares in that type
    return torch.bucketize(signed, bounds.to(signed.dtype), out_int32=True).expand(shape).reshape(-1)


def _on_cpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _sum_rows(table: torch.Tensor, rows: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return the sum over tokens of factor x the token's row of the table."""
    factors = factors.reshape(-1)
    if _on_cpu(table) or not len(rows):
        return factors.new_zeros(len(table)).index_add_(0, rows, factors) @ table
    # One thread sums a run of tokens in order, then the runs are summed. This is deterministic, unlike `index_add` on
    # CUDA, which adds in the order in which threads arrive. The sums of all runs take half the memory of a token-sized
    # tensor.
    per_run = 4 * table.shape[1]
    calls = 1 if len(rows) <= _TOKENS_PER_CALL else 2
    sums = []
    for part, weights in zip(rows.chunk(calls), factors.chunk(calls), strict=True):
        starts = torch.arange(0, len(part), per_run, dtype=part.dtype, device=part.device)
        sums.append(embedding_bag(part, table, starts, mode="sum", per_sample_weights=weights).sum(0))
    return reduce(torch.add, sums)
