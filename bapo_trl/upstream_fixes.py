"""Workarounds for what lies in TRL, transformers, accelerate or torch, each with the version it waits for."""

import functools

import torch
from transformers import Trainer, TrainerCallback

from .trl_compat import RepeatSampler


class EpochShuffleCallback(TrainerCallback):
    """
    Continues the shuffles of the prompts where the checkpoint left off.

    TRL's sampler draws a permutation from its own generator at the start of each epoch. A resumed run makes a new
    sampler, which would begin again with the permutation of the first epoch.

    Attributes:
        sampler ([`~trl.trainer.utils.RepeatSampler`], *optional*):
            Sampler of the run, once the trainer has made it; `None` for iterable datasets.
    """

    def __init__(self):
        self.sampler: RepeatSampler | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        if self.sampler is not None and self.sampler.shuffle:
            for _ in range(int(state.epoch or 0)):
                torch.randperm(self.sampler.num_samples, generator=self.sampler.generator)


@functools.cache
def load_onto_numbered_cpus() -> None:
    """
    Let `torch.load` put tensors on "cpu:0".

    In several processes on CPUs, accelerate's device has a number, and transformers hands it to `torch.load` for the
    optimizer's state. torch 2.13 knows "cpu" only, so that no such run could be resumed.
    """

    def restore(storage, location: str):
        return storage if location.startswith("cpu:") else None

    torch.serialization.register_package(0, lambda storage: None, restore)


def end_training(trainer: Trainer) -> None:
    """
    Finish the trackers and leave the process group; the trainer cannot train afterwards.

    The distributed wrapper of the model is let go first. Otherwise it is the last to hold the gloo process group,
    and destroys it while it holds Python's interpreter lock, which a thread of the group may be waiting for: the
    process then hangs on exit (seen in a third of two-process runs on CPUs, torch 2.13).

    Args:
        trainer ([`~transformers.Trainer`]):
            Trainer whose run is over.
    """
    trainer.model_wrapped = trainer.model
    trainer.accelerator.free_memory()
    trainer.accelerator.end_training()
