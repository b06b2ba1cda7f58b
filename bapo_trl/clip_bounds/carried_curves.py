"""Contribution curves of one update, carried over to the next: a forecast that needs no forward pass.

A normalized contribution curve is what the tokens of one sign contribute at each bound, over what they would
contribute at a ratio of 1: their total absolute advantage, the sum of w |A|. The curve changes little from one update
to the next. The totals of the next update are known before its forward pass, so its curves can be forecast.
"""

from dataclasses import asdict
from typing import Any

import torch

from .curves import Contributions
from .grid import BoundGrid, sum_dtype


class CarriedCurves:
    """The normalized curves that were last seen, the same on all ranks."""

    def __init__(self, grid: BoundGrid, device: torch.device):
        self._grid = grid
        self._device = device
        # Of fresh samples: at a ratio of 1, tokens contribute their total absolute advantage at every bound
        upper, lower = grid.upper_on(device), grid.lower_on(device)
        self._normalized = Contributions(torch.ones_like(upper), torch.ones_like(lower))

    def scaled_to(self, totals: Contributions) -> Contributions:
        """Return the curves of tokens with these totals, one value of each sign."""
        return Contributions(self._normalized.positive * totals.positive, self._normalized.negative * totals.negative)

    def learn(self, curves: Contributions, totals: Contributions) -> None:
        """Keep the curves of tokens with these totals. A sign without any keeps the curve that it had."""
        self._normalized = Contributions(
            torch.where(totals.positive > 0, curves.positive / totals.positive, self._normalized.positive),
            torch.where(totals.negative > 0, curves.negative / totals.negative, self._normalized.negative),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the curves, on the CPU, and their grid."""
        positive, negative = self._normalized.positive.cpu(), self._normalized.negative.cpu()
        return {"positive": positive, "negative": negative, "grid": asdict(self._grid)}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """
        Restore the curves; return whether they are on this grid, else nothing changes.

        The first update after that is on new samples, and learns its curves before it. So a resumed run reads of these
        only the curve of a sign that is missing in that update.
        """
        if state["grid"] != asdict(self._grid):
            return False
        dtype = sum_dtype(self._device)
        vector = torch.cat([state[sign].to(self._device, dtype) for sign in ("positive", "negative")])
        self._normalized = Contributions.from_vector(vector, self._grid)
        return True
