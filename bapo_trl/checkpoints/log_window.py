"""
The values that a log line is computed from, saved in checkpoints so that a resumed run logs the same line.

TRL collects the values of each metric from one log line to the next, and logs their mean. NaN stands for an undefined
value, which the mean skips.
"""

import math
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from .rank_files import RankFiles


LARGEST = ("ratio/max", "staleness/max", "partial/segments_max", "sampling/raw_importance_sampling_ratio/max")
"""Metrics of this package that are a maximum over ranks, micro-batches, updates and the window of a log line."""

SMALLEST = ("ratio/min", "sampling/raw_importance_sampling_ratio/min")
"""Metrics of this package that are a minimum over ranks, micro-batches, updates and the window of a log line."""

FILES = RankFiles("log window", "1", "resume from another checkpoint")


def reduce_window(values: MutableMapping[str, list[float]]) -> None:
    """Reduce each maximum and each minimum to one value, and remove metrics whose values are all undefined."""
    for name in list(values):
        defined = [value for value in values[name] if not math.isnan(value)]
        if not defined:
            del values[name]
        elif name in LARGEST:
            values[name] = [max(defined)]
        elif name in SMALLEST:
            values[name] = [min(defined)]


class LogWindow(TrainerCallback):
    """
    Save the metrics since a trainer's last log line, and restore them when a resumed run begins.

    transformers, and TRL up to 1.16 at least, do not save them: the first log line and `train_loss` would only cover
    the updates since the resume.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self._saved: dict[str, Any] | None = None
        trainer.pop_callback(LogWindow)  # of an earlier run
        trainer.add_callback(self)

    def save(self, checkpoint: str | Path) -> None:
        """Write the values of this rank into a checkpoint folder."""
        trainer, accelerator = self._trainer, self._trainer.accelerator
        state = {
            "metrics": {
                name: [float(value) for value in values]
                for name, values in trainer._metrics["train"].items()
                if name != "step_time" and not name.startswith("time/")  # differ from run to run
            },
            "loss": trainer._tr_loss.item(),
            "loss_of_run": trainer._total_loss_scalar,
            "last_logged": trainer._globalstep_last_logged,
        }
        FILES.write(checkpoint, accelerator.process_index, accelerator.num_processes, state)

    def load(self, checkpoint: str | Path) -> None:
        """Read the values of this rank; with another number of ranks, the values of some saved rank."""
        files = FILES.find(checkpoint)
        if files:
            self._saved = FILES.read(files[self._trainer.accelerator.process_index % len(files)])

    def on_train_begin(self, args, state, control, **kwargs):
        # Not in `load`, as transformers resets its own values to 0 after loading the checkpoint
        if self._saved is not None:
            trainer, saved = self._trainer, self._saved
            trainer._metrics["train"].update(saved["metrics"])
            trainer._tr_loss += saved["loss"]
            trainer._total_loss_scalar = saved["loss_of_run"]
            trainer._globalstep_last_logged = saved["last_logged"]
