"""Trains with a replay queue and is killed while the queue's second checkpoint file is half written."""

import os
import signal
import sys
from pathlib import Path

from bapo_trl import queue_checkpoint
from tests.test_replay import REPLAY
from tests.toy import toy_trainer


def main(folder: str) -> None:
    save_file = queue_checkpoint.save_file

    def killed_at_the_second(tensors, path, metadata):
        save_file(tensors, path, metadata=metadata)
        if "checkpoint-8" in str(path):
            Path(path).write_bytes(Path(path).read_bytes()[:100])
            os.kill(os.getpid(), signal.SIGKILL)

    queue_checkpoint.save_file = killed_at_the_second
    toy_trainer(folder, **{**REPLAY, "save_strategy": "steps", "save_steps": 4}).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
