"""The clip-bound controller: chooses and logs the bounds of each update, from its first micro-batch to its last.

It works on tokens and total absolute advantages, not on a trainer or its batch, so that any trainer can use it.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from .curves import Contributions, contributions, size_contributions
from .grid import sum_dtype
from .reduce import DistributedSums
from .search import ClipBounds, search_bounds, share_under
from .tokens import PolicyTokens
from .update_log import measure_tokens, unlogged_metrics, update_metrics


class ClipBoundController:
    """
    Choose the clip bounds of each update of a run, and collect its metrics.

    For each update, call `begin`, then `observe` for each micro-batch, then `close`. All ranks make the same calls.

    A sign's contribution curve, divided by its total absolute advantage, changes little from one update to the next.
    The normalized curves are therefore carried over: they forecast the next update without a forward pass.

    `settings` is a [`~bapo_config.BAPOConfig`], `device` the device of the tokens. `reduce` sums a tensor over ranks,
    `gather` concatenates the tensors of all ranks along the first dimension, and `update` returns the number of the
    update, for messages. `current` is the result of the latest search; the start bounds before the first one.
    """

    def __init__(
        self,
        settings: Any,
        device: torch.device,
        *,
        reduce: Callable[[torch.Tensor], torch.Tensor],
        gather: Callable[[torch.Tensor], torch.Tensor],
        update: Callable[[], int],
    ):
        self._settings, self._device = settings, device
        self._reduce, self._gather, self._update = reduce, gather, update
        self._grid = settings.bound_grid
        self._curves: Contributions | None = None  # of the tokens since the last search, of this rank
        # Normalized curves of all ranks: 1 at each bound for fresh samples, whose ratios are 1
        upper, lower = self._grid.upper_on(device), self._grid.lower_on(device)
        self._carried = Contributions(torch.ones_like(upper), torch.ones_like(lower))
        self._unlogged = unlogged_metrics(settings)
        self._searches: list[ClipBounds] = []  # of the current update
        self._sums: DistributedSums | None = None  # over its tokens so far, on this rank
        nothing = torch.zeros((), device=device)
        self.current = self._search(self._carried * Contributions(nothing, nothing))
        self._plan = "on arrival"  # how the current update gets its bounds; the others are "known" and "forecast"
        self._totals: Contributions | None = None  # total absolute advantages of the current update, of all ranks

    @property
    def carries_over(self) -> bool:
        """Whether the curves of an update forecast the curves of the next one."""
        return self._settings.search_scope == "carried_over" and self._settings.is_adaptive

    @property
    def is_open(self) -> bool:
        """Whether a micro-batch of the current update has been observed."""
        return self._sums is not None

    def begin(
        self,
        total_absolute_advantages: Contributions | None = None,
        read_ahead: Callable[[], Sequence[PolicyTokens]] | None = None,
        is_whole: bool = True,
    ) -> ClipBounds:
        """
        Begin an update, and choose its bounds unless `observe` will.

        The total absolute advantages, w |A| of each sign over the update's tokens on all ranks, normalize its curves
        and, without `read_ahead`, rescale the carried-over curves. `read_ahead` returns the tokens of the update's
        micro-batches on this rank as their losses will see them, to search on. If it returns none, or neither argument
        is given, `observe` searches. If the update will have more micro-batches than both arguments cover (not
        `is_whole`), call `add_totals` for the others.
        """
        self._totals = total_absolute_advantages
        ahead = [] if read_ahead is None else read_ahead()
        for tokens in ahead:
            self._add(tokens)
        if ahead and is_whole:
            self._plan = "known"
            self._use(self._search(self._take_curves()))
        elif ahead:  # a part of the update stands for all of it
            self._plan, self.current = "forecast", self._search(self._sum_curves())
        elif total_absolute_advantages is not None and read_ahead is None:
            self._plan, self.current = "forecast", self._search(self._carried * total_absolute_advantages)
        else:
            self._plan = "on arrival"
        return self.current

    def add_totals(self, total_absolute_advantages: Contributions) -> None:
        """Add the total absolute advantages of a micro-batch that `begin` did not know, of all ranks."""
        self._totals = self._totals + total_absolute_advantages

    @torch.no_grad()
    def observe(self, tokens: PolicyTokens, staleness: torch.Tensor | None, is_last: bool) -> ClipBounds:
        """
        Add a micro-batch; return the bounds, and the weight of negative tokens, to train it with.

        `staleness` is given per sample, `(B,)`, or per token, `(B, T)`, in policy versions; `None` if it is unknown.
        `is_last` marks the last micro-batch of the update.
        """
        if self._plan != "known":
            self._add(tokens)
            if is_last or self._settings.search_scope == "micro_batch":
                curves, forecasts = self._take_curves(), self._plan == "forecast"  # it logs the shares that came true
                self._use(share_under(self.current, curves, self._grid) if forecasts else self._search(curves))
        sums = measure_tokens(tokens, staleness, self.current, self._settings.delta)
        self._sums = sums if self._sums is None else self._sums + sums
        return self.current

    def close(self) -> dict[str, float]:
        """End the update; return its metrics, see [`update_metrics`] for the error it raises."""
        searches, sums = self._searches, self._sums
        self._searches, self._sums = [], None
        return update_metrics(searches, sums, self._gather, self._update(), self._unlogged)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next update needs: the carried-over curves, on the CPU, and their grid."""
        positive, negative = self._carried.positive.cpu(), self._carried.negative.cpu()
        return {"positive": positive, "negative": negative, "grid": asdict(self._grid)}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """
        Restore the carried-over curves and return `True`; change nothing and return `False` if their grid differs.

        They are those of the last update before the checkpoint, so that a resumed run makes the same forecast.
        """
        if state["grid"] != asdict(self._grid):
            return False
        vector = torch.cat([state["positive"], state["negative"]]).to(self._device, sum_dtype(self._device))
        self._carried = Contributions.from_vector(vector, self._grid)
        return True

    def _add(self, tokens: PolicyTokens) -> None:
        """Add the tokens of a micro-batch to the tokens of the next search."""
        inputs = tokens.advantages, tokens.weights
        if tokens.gradient_size is None:
            measure, delta = self._settings.contribution_measure, self._settings.delta
            curves = contributions(tokens.ratio, *inputs, self._grid, measure, delta)
        else:
            curves = size_contributions(tokens.gradient_size, *inputs)
        self._curves = curves if self._curves is None else self._curves + curves

    def _take_curves(self) -> Contributions:
        """Return the curves, over all ranks, of the tokens since the last search; keep them if they carry over."""
        curves = self._sum_curves()
        if self._totals is not None:
            self._carried = curves.over(self._totals, self._carried)
        return curves

    def _sum_curves(self) -> Contributions:
        curves = Contributions.from_vector(self._reduce(self._curves.as_vector()), self._grid)
        self._curves = None
        return curves

    def _search(self, curves: Contributions) -> ClipBounds:
        settings = self._settings
        target, smallest = settings.positive_contribution_target, settings.negative_weight_min
        bounds = search_bounds(curves, self._grid, target, settings.search_order, smallest)
        if settings.has_constant_weight:
            bounds = replace(bounds, negative_weight=torch.full_like(bounds.negative_weight, smallest))
        return bounds

    def _use(self, bounds: ClipBounds) -> None:
        self._searches.append(bounds)
        self.current = bounds
