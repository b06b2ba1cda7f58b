"""Contribution curves of one update, carried over to the next: a forecast that needs no forward pass.

A curve per unit of mass is what the tokens of one sign contribute at each bound, over what they would contribute at a
ratio of 1 (their mass, the sum of w |A|). It changes little from one update to the next. The masses of the next update
are known before its forward pass, so its curves can be told in advance.
"""

from pathlib import Path

import torch

from .bound_grid import BoundGrid
from .clip_bounds import Contributions
from .rank_files import RankFiles


CURVES_FILE = RankFiles("carried curves", "1", "remove the file to start with the curves of fresh samples")


class CarriedCurves:
    """
    The curves per unit of mass that were last seen, the same on all ranks.

    Args:
        grid ([`~bound_grid.BoundGrid`]):
            Candidate bounds.
        device (`torch.device`):
            Device of the curves.
    """

    def __init__(self, grid: BoundGrid, device: torch.device):
        self._grid = grid
        self._device = device
        self.forget()

    def forget(self) -> None:
        """Go back to the curves of fresh samples: at a ratio of 1, tokens contribute their mass at every bound."""
        upper, lower = self._grid.upper_on(self._device), self._grid.lower_on(self._device)
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
        CURVES_FILE.write(folder, 0, 1, tensors, {})

    def load(self, folder: str | Path) -> bool:
        """
        Restore the curves from a checkpoint folder; return whether it holds some.

        Raises:
            ValueError: If the file is damaged, or of a run with other candidate bounds.
        """
        path = CURVES_FILE.path(folder, 0, 1)
        if not path.exists():
            return False
        tensors, _ = CURVES_FILE.read(path)
        shapes = [(self._grid.num_upper,), (self._grid.num_lower,)]
        if [tuple(tensors[sign].shape) for sign in ("positive", "negative") if sign in tensors] != shapes:
            raise ValueError(
                f"The carried curves {path} are of a run with other candidate bounds: set `ratio_lower_*` and "
                f"`ratio_upper_*` as they were, or {CURVES_FILE.remedy}."
            )
        self._per_mass = Contributions(tensors["positive"].to(self._device), tensors["negative"].to(self._device))
        return True
