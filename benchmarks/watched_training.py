"""Helpers that time each update of a training, or run a training update by update."""

import threading
import time
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from transformers import TrainerCallback
from trl import GRPOTrainer

from benchmarks.common import in_turns


T = TypeVar("T")


class UpdateClock(TrainerCallback):
    """Callback that records the time at the start of each update and at the end of the training."""

    def __init__(self, read: Callable[[], Any] = time.perf_counter):
        self.read = read
        self.readings: list = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.readings.append(self.read())

    def on_train_end(self, args, state, control, **kwargs):
        self.readings.append(self.read())


class SteppedTraining(TrainerCallback):
    """Training in a separate thread that pauses at every `on_step_begin`."""

    def __init__(self, trainer: GRPOTrainer):
        self.trainer = trainer
        self.forwards = 0  # passes of the model
        self._resume = threading.Semaphore(0)
        self._stops: SimpleQueue[Exception | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._train, daemon=True)
        trainer.add_callback(self)
        trainer.model.register_forward_pre_hook(self._count_forward)

    def start(self):
        """Start the training, and run it up to the first update."""
        self._thread.start()
        self._wait_for_stop()

    def update(self):
        """Run one update, up to the next one, in the training's thread."""
        self._resume.release()
        self._wait_for_stop()

    def finish(self):
        """Run the last update and end the training."""
        self.update()
        self._thread.join()

    def on_step_begin(self, args, state, control, **kwargs):
        self._stops.put(None)
        self._resume.acquire()

    def _train(self):
        error = None
        try:
            self.trainer.train()
        except Exception as raised:
            error = raised
        self._stops.put(error)

    def _wait_for_stop(self):
        if error := self._stops.get():
            raise error

    def _count_forward(self, module, inputs):
        self.forwards += 1


def train_in_turns(
    trainers: Mapping[str, GRPOTrainer],
    updates: int,
    measure: Callable[[SteppedTraining, Callable[[], None]], T],
) -> dict[str, list[T]]:
    """Train all trainers in turns, update by update, on the same samples; return what `measure` returns of each."""
    runs = {name: SteppedTraining(trainer) for name, trainer in trainers.items()}
    for run in runs.values():
        run.start()
    measured: dict[str, list[T]] = {name: [] for name in trainers}
    for index, name in in_turns(trainers, updates):
        torch.manual_seed(index)  # by which TRL shuffles the samples of a generation: the same for all trainers
        run = runs[name]
        measured[name].append(measure(run, run.update if index < updates - 1 else run.finish))
    return measured
