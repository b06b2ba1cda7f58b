"""The search of a run: what it has seen of the tokens since the last one, and the bounds it chooses for them."""

from collections.abc import Callable

import torch

from .bound_grid import BoundGrid
from .clip_bounds import ClipBounds, Contributions, contributions, search_bounds
from .policy_tokens import PolicyTokens


class BoundSearch:
    """
    Collects the contribution curves of micro-batches until their bounds are due.

    Args:
        grid ([`~bound_grid.BoundGrid`]):
            Candidate bounds.
        measure (`str`):
            What a token contributes, see [`~clip_bounds.contributions`].
        target (`float`):
            Share of the policy loss that positive-advantage tokens are to contribute.
        order (`str`):
            Which bound moves first, see [`~clip_bounds.search_bounds`].
        delta (`float`, *optional*):
            TRL's two-sided clip, which stops tokens above it.
        device (`torch.device`):
            Device of the bounds.
        sum_over_ranks (`Callable[[torch.Tensor], torch.Tensor]`):
            Sums a tensor over the ranks.
    """

    def __init__(
        self,
        grid: BoundGrid,
        *,
        measure: str,
        target: float,
        order: str,
        delta: float | None,
        device: torch.device,
        sum_over_ranks: Callable[[torch.Tensor], torch.Tensor],
    ):
        self.grid = grid
        self._measure = measure
        self._target = target
        self._order = order
        self._delta = delta
        self._device = device
        self._sum_over_ranks = sum_over_ranks
        self._curves: Contributions | None = None

    def start_bounds(self) -> ClipBounds:
        """Return the bounds at which each search starts."""
        upper, lower = self.grid.upper_on(self._device), self.grid.lower_on(self._device)
        return self._search(Contributions(torch.zeros_like(upper), torch.zeros_like(lower)))

    def add(self, tokens: PolicyTokens) -> None:
        """Add the tokens of a micro-batch to those of the next search."""
        curves = contributions(
            tokens.ratio,
            tokens.advantages,
            tokens.weights,
            self.grid,
            measure=self._measure,
            delta=self._delta,
        )
        self._curves = curves if self._curves is None else self._curves + curves

    def choose(self) -> ClipBounds:
        """Choose the bounds for the tokens added since the last search, of all ranks."""
        curves = Contributions.from_vector(self._sum_over_ranks(self._curves.as_vector()), self.grid)
        self._curves = None
        return self._search(curves)

    def _search(self, curves: Contributions) -> ClipBounds:
        return search_bounds(curves, self.grid, self._target, self._order)
