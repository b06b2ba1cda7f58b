"""BAPO with bounds that follow the search slowly, which the study of stability tries."""

from dataclasses import replace

from bapo_trl import BAPOTrainer
from bapo_trl.bound_search import BoundSearch
from bapo_trl.clip_bounds import ClipBounds


class SmoothedSearch(BoundSearch):
    """Moves both bounds a tenth of the way to what the search found; shares are those of what it found."""

    _latest: ClipBounds | None = None

    def choose(self) -> ClipBounds:
        found, latest = super().choose(), self._latest or self.start_bounds()
        self._latest = replace(found, low=latest.low.lerp(found.low, 0.1), high=latest.high.lerp(found.high, 0.1))
        return self._latest


class SmoothedBAPOTrainer(BAPOTrainer):
    """[`BAPOTrainer`] with [`SmoothedSearch`]."""

    def _start_over(self):
        super()._start_over()
        self._search = SmoothedSearch(self.args, self.accelerator.device, self._sum_over_ranks)
