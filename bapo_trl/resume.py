"""Restore on resume what TRL and transformers do not."""

import functools

import torch
from transformers import TrainerCallback

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
