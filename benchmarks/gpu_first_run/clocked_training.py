"""Run `train_bapo.py` and write the seconds of each update to a file: `clocked_training.py FILE FLAGS ...`."""

import json
import sys
from itertools import pairwise
from pathlib import Path

from transformers import trainer

from bapo_trl.cli import train
from bapo_trl.script.commands import SCRIPT
from benchmarks.watched_training import UpdateClock


class WritingClock(UpdateClock):
    def on_train_end(self, args, state, control, **kwargs):
        super().on_train_end(args, state, control, **kwargs)
        if state.is_world_process_zero:
            Path(sys.argv[1]).write_text(json.dumps([after - before for before, after in pairwise(self.readings)]))


if __name__ == "__main__":
    trainer.DEFAULT_CALLBACKS.append(WritingClock)
    train(sys.argv[2:], SCRIPT)
