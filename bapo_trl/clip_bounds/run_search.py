"""The search of a run: what it has seen of the tokens since the last one, and the bounds it chooses for them."""

from collections.abc import Callable
from dataclasses import replace

import torch

from .carried_curves import CarriedCurves
from .curves import Contributions, contributions, size_contributions
from .grid import BoundGrid
from .search import ClipBounds, search_bounds, share_under
from .tokens import PolicyTokens


class BoundSearch:
    """
    Collects the contribution curves of micro-batches until their bounds are due.

    Attributes:
        carried ([`~clip_bounds.carried_curves.CarriedCurves`]): What `choose_carried` goes by.
    """

    def __init__(
        self,
        grid: BoundGrid,
        *,
        measure: str,
        target: float,
        order: str,
        delta: float | None,
        negative_weight_min: float,
        has_constant_weight: bool,
        negative_ratio_cap: float | None,
        device: torch.device,
        sum_over_ranks: Callable[[torch.Tensor], torch.Tensor],
    ):
        self.grid = grid
        self._measure = measure
        self._target = target
        self._order = order
        self._delta = delta
        self._negative_weight_min = negative_weight_min
        self._has_constant_weight = has_constant_weight
        self._negative_ratio_cap = negative_ratio_cap
        self._device = device
        self._sum_over_ranks = sum_over_ranks
        self._curves: Contributions | None = None
        self.carried = CarriedCurves(grid, device)

    def start_bounds(self) -> ClipBounds:
        """Return the bounds at which each search starts."""
        upper, lower = self.grid.upper_on(self._device), self.grid.lower_on(self._device)
        return self._search(Contributions(torch.zeros_like(upper), torch.zeros_like(lower)))

    def add(self, tokens: PolicyTokens) -> None:
        """Add the tokens of a micro-batch to those of the next search."""
        curves = self._contributions(tokens)
        self._curves = curves if self._curves is None else self._curves + curves

    def choose(self) -> ClipBounds:
        """Choose the bounds for the tokens added since the last search, of all ranks."""
        return self._search(self._take_curves())

    def choose_carried(self, masses: Contributions) -> ClipBounds:
        """
        Choose the bounds for tokens of these masses, of all ranks, by the curves that are carried over.

        Args:
            masses ([`~clip_bounds.Contributions`]): Sum of w |A| of each sign, curves of one point.
        """
        return self._search(self.carried.scaled_to(masses))

    def carry(self, masses: Contributions) -> Contributions:
        """Carry the curves of the tokens added since the last search over; return them, of all ranks."""
        curves = self._take_curves()
        self.carried.learn(curves, masses)
        return curves

    def judge(self, bounds: ClipBounds, curves: Contributions) -> ClipBounds:
        """Return `bounds` with the shares that they have on `curves`."""
        return share_under(bounds, curves, self.grid, self._target)

    def _contributions(self, tokens: PolicyTokens) -> Contributions:
        if tokens.gradient_size is None:
            return contributions(
                tokens.ratio,
                tokens.advantages,
                tokens.weights,
                self.grid,
                measure=self._measure,
                delta=self._delta,
                negative_ratio_cap=self._negative_ratio_cap,
            )
        balanced = tokens.balanced_advantages(1.0, self._negative_ratio_cap)
        return size_contributions(tokens.gradient_size, balanced, tokens.weights)

    def _take_curves(self) -> Contributions:
        curves = Contributions.from_vector(self._sum_over_ranks(self._curves.as_vector()), self.grid)
        self._curves = None
        return curves

    def _search(self, curves: Contributions) -> ClipBounds:
        bounds = search_bounds(curves, self.grid, self._target, self._order, self._negative_weight_min)
        if self._has_constant_weight:
            weight = torch.full_like(bounds.negative_weight, self._negative_weight_min)
            bounds = replace(bounds, negative_weight=weight)
        return bounds
