"""The clip-bound controller's state in a checkpoint: one file for all ranks."""

import warnings
from pathlib import Path

from accelerate import PartialState

from ..parts import Part
from .rank_errors import on_main_process
from .rank_files import RankFiles


FILES = RankFiles("carried curves", "2", "remove the file to continue without it")
CURVES_FILE = FILES.path("", 0, 1).name
"""Name of the file in a checkpoint."""


class CarriedCurves(Part):
    """The curves that a trainer's controller, `bounds_controller`, carries over from one update to the next."""

    def reset(self, run):
        self._run = run

    def save(self, folder, clock):
        bounds = self._run.bounds_controller
        if self._run.args.should_save and bounds.carries_over:
            FILES.write(folder, 0, 1, bounds.state_dict())

    def load_together(self, folder):
        """
        Restore the curves on all ranks, as read by the first one.

        If the checkpoint has none, the first update starts as in a new run, with a warning.
        """
        path, bounds = Path(folder, CURVES_FILE), self._run.bounds_controller
        if not bounds.carries_over:
            return
        state = on_main_process(lambda: FILES.read(path) if path.exists() else None)
        is_restored = state is not None and bounds.load_state_dict(state)
        if not is_restored and PartialState().is_main_process:
            warnings.warn(
                f"The checkpoint {folder} has no carried-over curves for these candidate bounds (`search_scope` "
                "'carried_over'): unless the first update trains on fresh samples, its estimate assumes ratios of 1."
            )

    def dispensable(self, file):
        return file == CURVES_FILE
