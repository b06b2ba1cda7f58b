"""Workarounds for what lies in TRL, transformers, accelerate or torch, each with the version it waits for."""

import functools
import math
from pathlib import Path
from typing import cast

import torch
from datasets import IterableDataset
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from ..trainer_mixin import TrainerMixin
from .trl_compat import RepeatSampler


class EpochShuffleCallback(TrainerCallback):
    """
    Continues the shuffles of the prompts where the checkpoint left off.

    TRL's sampler draws a permutation from its own generator at the start of each epoch. A resumed run makes a new
    sampler, which would begin again with the permutation of the first epoch. Needed up to TRL 1.16 at least.

    Args:
        sampler ([`~trl.trainer.utils.RepeatSampler`], *optional*):
            Sampler of the run; `None` for iterable datasets.
    """

    def __init__(self, sampler: RepeatSampler | None):
        self.sampler = sampler

    def on_train_begin(self, args, state, control, **kwargs):
        if self.sampler is not None and self.sampler.shuffle:
            for _ in range(int(state.epoch or 0)):
                torch.randperm(self.sampler.num_samples, generator=self.sampler.generator)


class ResumeFixes(TrainerMixin):
    """Lets a resumed run go on where it was. To be put before [`~trl.GRPOTrainer`] among the bases of a trainer."""

    def _get_train_sampler(self, dataset=None):
        sampler = cast(RepeatSampler, super()._get_train_sampler(dataset))
        self.pop_callback(EpochShuffleCallback)  # of an earlier run
        self.add_callback(EpochShuffleCallback(sampler))
        return sampler

    def _init_training_state(
        self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
    ):
        epochs_trained, micro_batches_to_skip = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if self.state.global_step >= max_steps:  # within an epoch, transformers would make one update more
            return num_train_epochs, 0
        is_stream = isinstance(self.train_dataset, IterableDataset)
        if is_stream and resume_from_checkpoint is not None and not self.args.ignore_data_skip:
            epochs_trained, updates = place_in_stream(resume_from_checkpoint)
            micro_batches_to_skip = updates * self.args.gradient_accumulation_steps
        # TRL's sampler repeats the prompts of a generation for each of its micro-batches, and goes on among them.
        # TRL's count would start at 0: generations would lie across these blocks, and a next resume lose prompts.
        self._step = micro_batches_to_skip % self.args.micro_batches_per_generation
        return epochs_trained, micro_batches_to_skip

    def _load_optimizer_and_scheduler(self, checkpoint):
        load_onto_numbered_cpus()
        super()._load_optimizer_and_scheduler(checkpoint)


def place_in_stream(checkpoint: str | Path) -> tuple[int, int]:
    """
    Return where in a dataset without a length a checkpoint was saved: the passes before, and the updates in this one.

    transformers takes `max_steps` updates for one pass, and so would resume in the first pass, behind its end. But it
    counts the passes that it makes: `epoch` of the state is their number, plus the updates in this one over
    `max_steps`. Needed up to transformers 5.17 at least.

    Args:
        checkpoint (`str` or `Path`):
            Checkpoint folder.

    Returns:
        Tuple of the number of passes and that of updates, of which there is at least one.
    """
    state = TrainerState.load_from_json(str(Path(checkpoint, TRAINER_STATE_NAME)))
    passes = math.ceil(state.epoch) - 1
    return passes, round((state.epoch - passes) * state.max_steps)


@functools.cache
def load_onto_numbered_cpus() -> None:
    """
    Let `torch.load` put tensors on "cpu:0".

    In several processes on CPUs, accelerate's device has a number, and transformers hands it to `torch.load` for the
    optimizer's state. torch 2.13 knows "cpu" only, so that no such run could be resumed. Needed up to torch 2.13 and
    transformers 5.17 at least.
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
