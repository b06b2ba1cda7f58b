"""Contribution curves of one update, carried over to the next: a forecast that needs no forward pass.

A curve per unit of mass is what the tokens of one sign contribute at each bound, over what they would contribute at a
ratio of 1 (their mass, the sum of w |A|). It changes little from one update to the next. The masses of the next update
are known before its forward pass, so its curves can be told in advance.
"""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from ..checkpoints.rank_files import RankFiles
from .curves import Contributions
from .grid import BoundGrid, sum_dtype


_FILES = RankFiles("carried curves", "1", "remove the file to go on without")
CURVES_FILE = _FILES.path("", 0, 1).name
"""Name of the file in a checkpoint."""


class CarriedCurves:
    """The curves per unit of mass that were last seen, the same on all ranks."""

    def __init__(self, grid: BoundGrid, device: torch.device):
        self._grid = grid
        self._device = device
        # Of fresh samples: at a ratio of 1, tokens contribute their mass at every bound
        upper, lower = grid.upper_on(device), grid.lower_on(device)
        self._per_mass = Contributions(torch.ones_like(upper), torch.ones_like(lower))

    def scaled_to(self, masses: Contributions) -> Contributions:
        """Return the curves of tokens with these masses, one value of each sign."""
        return Contributions(self._per_mass.positive * masses.positive, self._per_mass.negative * masses.negative)

    def learn(self, curves: Contributions, masses: Contributions) -> None:
        """Keep the curves of tokens with these masses. A sign without mass keeps the curve that it had."""
        self._per_mass = Contributions(
            torch.where(masses.positive > 0, curves.positive / masses.positive, self._per_mass.positive),
            torch.where(masses.negative > 0, curves.negative / masses.negative, self._per_mass.negative),
        )

    def save(self, folder: str | Path) -> None:
        """Write the curves into a checkpoint folder, for all ranks."""
        tensors = {"positive": self._per_mass.positive.cpu(), "negative": self._per_mass.negative.cpu()}
        _FILES.write(folder, 0, 1, tensors, asdict(self._grid))

    def load(self, folder: str | Path) -> bool:
        """
        Restore the curves from a checkpoint folder; return whether it holds some on this grid.

        The first update after that is on new samples, and learns its curves before it. So a resumed run reads of these
        only the curve of a sign that has no mass in that update. A damaged file is a `ValueError` that names it.
        """
        path = _FILES.path(folder, 0, 1)
        if not path.exists():
            return False
        tensors, grid = _FILES.read(path)
        shapes = [tuple(tensors[sign].shape) for sign in ("positive", "negative") if sign in tensors]
        if shapes != [(self._grid.num_upper,), (self._grid.num_lower,)] or grid not in ({}, asdict(self._grid)):
            return False
        dtype = sum_dtype(self._device)
        self._per_mass = Contributions(
            tensors["positive"].to(self._device, dtype), tensors["negative"].to(self._device, dtype)
        )
        return True

    def share(self, broadcast: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Take those of the first rank."""
        self._per_mass = Contributions.from_vector(broadcast(self._per_mass.as_vector()), self._grid)
