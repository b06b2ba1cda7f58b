"""
What a line of the log says of the updates that it covers, also of those before a checkpoint.

TRL collects the values of each metric from one line to the next, and logs their mean. NaN stands for an undefined
value, which the mean leaves out.
"""

import math
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from .rank_files import RankFiles


LARGEST = ("ratio/max", "staleness/max", "partial/segments_max", "sampling/raw_importance_sampling_ratio/max")
"""Metrics of this package that are a maximum, over ranks, micro-batches, updates and the window of a log line."""

SMALLEST = ("ratio/min", "sampling/raw_importance_sampling_ratio/min")
"""Metrics that are a minimum, over the same."""

OF_TOKENS = (
    "entropy", "kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "clip_ratio/low_min",
    "clip_ratio/high_max", "cispo_clip_ratio", "vespo/phi_seq_mean",
)  # fmt: skip
"""Metrics that TRL measures over the tokens of each micro-batch, as 0 where there is none."""

FILES = RankFiles("log window", "1", "resume from another checkpoint")


def leave_out_empty(values: MutableMapping[str, list[float]], have_tokens: Sequence[bool]) -> None:
    """Make [`OF_TOKENS`] undefined for those of the latest micro-batches without a token of the loss on any rank."""
    count = len(have_tokens)
    for name in OF_TOKENS:
        if name in values:
            latest = zip(values[name][-count:], have_tokens, strict=True)
            values[name][-count:] = [value if has_token else math.nan for value, has_token in latest]


def reduce_window(values: MutableMapping[str, list[float]]) -> None:
    """Reduce each maximum and each minimum to one value, and remove the metrics that are undefined throughout."""
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
    Saves what a trainer measured since its last log line, and gives it back as a resumed run begins.

    transformers and TRL up to 1.16 at least keep it in memory alone: the first log line and `train_loss` would cover
    the updates since the resume.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self._saved: dict[str, Any] | None = None
        trainer.pop_callback(LogWindow)  # of an earlier run
        trainer.add_callback(self)

    def save(self, checkpoint: str | Path) -> None:
        """Write those of this rank into a checkpoint folder."""
        trainer, accelerator = self._trainer, self._trainer.accelerator
        state = {
            "metrics": {
                name: [float(value) for value in values]
                for name, values in trainer._metrics["train"].items()
                if name != "step_time"  # differs from run to run
            },
            "loss": trainer._tr_loss.item(),
            "loss_of_run": trainer._total_loss_scalar,
            "last_logged": trainer._globalstep_last_logged,
        }
        FILES.write(checkpoint, accelerator.process_index, accelerator.num_processes, state)

    def load(self, checkpoint: str | Path) -> None:
        """Read those of this rank; with another number of ranks, of one that stands for it."""
        files = FILES.find(checkpoint)
        if files:
            self._saved = FILES.read(files[self._trainer.accelerator.process_index % len(files)])

    def on_train_begin(self, args, state, control, **kwargs):
        # Here, as transformers sets its own to 0 after it has loaded all else
        if self._saved is not None:
            trainer, saved = self._trainer, self._saved
            trainer._metrics["train"].update(saved["metrics"])
            trainer._tr_loss += saved["loss"]
            trainer._total_loss_scalar = saved["loss_of_run"]
            trainer._globalstep_last_logged = saved["last_logged"]
