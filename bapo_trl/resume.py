"""Restore on resume what TRL does not."""

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
