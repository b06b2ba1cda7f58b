"""What happens in a save and in the training after it, to be killed in the middle of it; where a run starts, and what
it leaves."""

import os
import re
import signal
import sys
from pathlib import Path

import safetensors.torch
import torch
from transformers import TrainerCallback

from bapo_trl.checkpoints import atomic
from bapo_trl.checkpoints.files import UNFINISHED
from bapo_trl.rollouts.partial import PartialRollouts


class SaveEvents:
    """
    Lists what a process does from the save at one update to the next save, and kills it before an event, named or
    numbered.

    Events of the save are what Python audits (files opened for writing, renames, removals), the writers of torch and
    safetensors, which it does not see, waiting for the other ranks, the start and the end. After it come the rounds of
    partial rollouts and the micro-batches, numbered from 1. A process that `tears` cuts the file that was written
    since the event before in half first, as if the kill had come within it. Without an update, all events of a run up
    to its last save are listed.
    """

    def __init__(self, update: int | None, kill_at: int | str | None = None, tears: bool = False):
        self.names: list[str] = []
        self.follows_write: list[bool] = []
        self._update, self._kill_at, self._tears = update, kill_at, tears
        self._latest: str | None = None
        self._is_watched, self._is_saving = update is None, False

    def watch(self, trainer) -> None:
        save, wait = trainer._save_checkpoint, atomic.raise_on_all_ranks

        def watched_save(*args, **kwargs):
            step = trainer.state.global_step
            is_watched = step < trainer.state.max_steps if self._update is None else step == self._update
            self._is_watched = self._is_saving = is_watched
            self._happens("start")
            save(*args, **kwargs)
            self._happens("end")
            self._is_saving = False

        def watched_wait(error):
            if self._is_saving:
                self._happens("wait")
            wait(error)

        trainer._save_checkpoint, atomic.raise_on_all_ranks = watched_save, watched_wait
        PartialRollouts._continue = self._numbered(PartialRollouts._continue, "round")
        trainer.training_step = self._numbered(trainer.training_step, "micro-batch")
        sys.addaudithook(self._audit)
        torch.save = self._watched(torch.save, "torch.save")
        safetensors.torch.serialize_file = self._watched(safetensors.torch.serialize_file, "safetensors")

    def _watched(self, write, name):
        def watched_write(content, path, *args, **kwargs):
            self._happens(f"{name} {os.path.basename(path)}")
            write(content, path, *args, **kwargs)
            if self._is_saving:
                self._latest = str(path)

        return watched_write

    def _numbered(self, call, name):
        def numbered_call(*args, **kwargs):
            count = sum(event.startswith(name) for event in self.names)
            self._happens(f"{name} {count + 1}")
            return call(*args, **kwargs)

        return numbered_call

    def _audit(self, event, args):
        if not self._is_saving:
            return
        if event == "open" and isinstance(args[0], str) and args[2] & (os.O_WRONLY | os.O_RDWR):
            self._happens(f"open {os.path.basename(args[0])}")
            self._latest = args[0]
        elif event in ("os.rename", "os.remove", "os.rmdir"):
            self._happens(f"{event} {os.path.basename(args[0])}")

    def _happens(self, name):
        if not self._is_watched:
            return
        if self._kill_at in (name, len(self.names)):
            if self._tears:
                os.truncate(self._latest, os.path.getsize(self._latest) // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        self.names.append(name)
        self.follows_write.append(self._latest is not None)
        self._latest = None


class Start(TrainerCallback):
    update = None

    def on_train_begin(self, args, state, control, **kwargs):
        self.update = state.global_step


def names(folder) -> set[str]:
    """Return what is in a folder; of the folders of unfinished saves, without the id of the run."""
    found = {path.name for path in Path(folder).iterdir()} - {"README.md"}
    return {re.sub(rf"^{UNFINISHED}-[0-9a-f]{{8}}-\d+$", UNFINISHED, name) for name in found}
