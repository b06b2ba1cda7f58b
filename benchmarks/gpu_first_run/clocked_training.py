"""`train_bapo.py` that writes the seconds of each update, up to the next one: `clocked_training.py FILE FLAGS ...`."""

import json
import sys
import time
from itertools import pairwise
from pathlib import Path

from transformers import TrainerCallback, trainer

from bapo_trl.cli import train
from bapo_trl.script.commands import SCRIPT


class UpdateClock(TrainerCallback):
    """Writes how long each update took, with what comes after it."""

    def __init__(self):
        self.times: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.times.append(time.perf_counter())

    def on_train_end(self, args, state, control, **kwargs):
        times = [*self.times, time.perf_counter()]
        Path(sys.argv[1]).write_text(json.dumps([after - before for before, after in pairwise(times)]))


if __name__ == "__main__":
    trainer.DEFAULT_CALLBACKS.append(UpdateClock)
    train(sys.argv[2:], SCRIPT)
