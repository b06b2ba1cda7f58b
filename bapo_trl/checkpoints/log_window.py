"""
What a run measured since its last log line, in a checkpoint.

transformers and TRL up to 1.16 at least average it in memory alone: the first log line of a resumed run would cover
the updates since the checkpoint, and `train_loss`, at the end, those of the last resume.
"""

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from .rank_files import RankFiles


FILES = RankFiles("log window", "1", "resume from another checkpoint")
_OF_THE_CLOCK = ("step_time",)  # differs from run to run


class LogWindow(TrainerCallback):
    """Saves the values of a trainer's next log line, and gives them back as a run begins that is resumed."""

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
                if name not in _OF_THE_CLOCK
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
