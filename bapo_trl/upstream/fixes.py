"""Workarounds for what lies in TRL, transformers, accelerate or torch, each with the version it waits for."""

import functools
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from datasets import IterableDataset
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from ..errors import InputError
from .trl_compat import RepeatSampler


class EpochShuffleCallback(TrainerCallback):
    """
    Continues the shuffles of the prompts where the checkpoint left off.

    A resumed run makes a new sampler of TRL's, which draws a permutation from its own generator at the start of each
    epoch, and would begin with that of the first. Needed up to TRL 1.16 at least.
    """

    def __init__(self, trainer: Trainer, sampler: RepeatSampler | None):
        self.sampler = sampler
        trainer.pop_callback(EpochShuffleCallback)  # of an earlier run
        trainer.add_callback(self)

    def on_train_begin(self, args, state, control, **kwargs):
        if self.sampler is not None and self.sampler.shuffle:
            for _ in range(int(state.epoch or 0)):
                torch.randperm(self.sampler.num_samples, generator=self.sampler.generator)


def reset_grpo_state(trainer: Any) -> None:
    """Forget what TRL makes with the trainer, and not for each run. Needed up to TRL 1.16 at least."""
    trainer._step, trainer._buffered_inputs = 0, None
    trainer.entropy_coef, trainer._last_world_entropy = trainer.args.entropy_coef, math.inf
    trainer._entropy_window_stats = None
    for left in (*trainer._metrics.values(), trainer._pending_metrics, trainer._pending_extra_logs):
        left.clear()


def restore_callbacks(trainer: Trainer) -> None:
    """
    Give callbacks their state of a checkpoint, such as the evaluations for which `EarlyStoppingCallback` has waited.

    transformers saves it, and reads it only with `restore_callback_states_from_checkpoint`, which replaces the
    callbacks' own settings too. A callback that the checkpoint does not know would fail the next save with a
    `KeyError`. Needed up to transformers 5.17 at least.
    """
    known: Any = trainer.state.stateful_callbacks
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ExportableState):
            saved = known.setdefault(type(callback).__name__, callback.state())
            if isinstance(saved, dict):  # of several callbacks of one class, it is a list
                for attribute, value in saved.get("attributes", {}).items():
                    setattr(callback, attribute, value)


def place_to_resume(
    trainer: Any, place: tuple[int, int], max_steps: int, num_train_epochs: int, checkpoint: str | None
) -> tuple[int, int]:
    """Return where the data of a resumed run goes on, by transformers' `place`: epochs and micro-batches to skip."""
    if trainer.state.global_step >= max_steps:  # within an epoch, transformers would make one update more
        epochs = trainer.args.num_train_epochs  # transformers' own number is rounded up
        if checkpoint is not None and trainer.args.max_steps <= 0 and round(trainer.state.epoch, 2) < round(epochs, 2):
            raise InputError(
                f"Nothing would be trained: the checkpoint {checkpoint} is at epoch {trainer.state.epoch:.2f}, with "
                f"{trainer.state.global_step} updates, and with these settings {epochs:g} epochs have "
                f"{max_steps}. Resume with as many processes and samples an update as before, or give `max_steps`."
            )
        return num_train_epochs, 0
    is_stream = isinstance(trainer.train_dataset, IterableDataset)
    if is_stream and checkpoint is not None and not trainer.args.ignore_data_skip:
        passes, updates = place_in_stream(checkpoint)
        return passes, updates * trainer.args.gradient_accumulation_steps
    return place


def load_trained_adapter(trainer: Any, checkpoint: str) -> None:
    """
    Load the adapter that is trained where the reference is another one, as in a run on a saved adapter with `beta`.

    transformers finds the reference in a folder of the checkpoint, and looks for all adapters in such folders, beside
    which peft saves the one that is trained. Needed up to transformers 5.17 at least.
    """
    if is_peft_model(trainer.model) and "ref" in trainer.model.peft_config and not trainer.is_fsdp_enabled:
        trainer.model.load_adapter(checkpoint, "default", is_trainable=True)


@contextmanager
def warning_if_rate_differs(trainer: Trainer) -> Iterator[None]:
    """Warn where the schedule of a checkpoint, which is loaded within, has another learning rate than the settings."""
    rates = list(getattr(trainer.lr_scheduler, "base_lrs", []))
    yield
    loaded = list(getattr(trainer.lr_scheduler, "base_lrs", []))
    if rates and rates != loaded and trainer.accelerator.is_main_process:
        warnings.warn(
            f"The checkpoint's learning rate goes on, {loaded[0]:g}, not `learning_rate` {rates[0]:g}: a run is "
            "resumed with its schedule. For another rate, start a run from the checkpoint's folder as the model."
        )


def place_in_stream(checkpoint: str | Path) -> tuple[int, int]:
    """
    Return where in a dataset without a length a checkpoint was saved: the passes before, and the updates (at least 1)
    in this one.

    transformers takes `max_steps` updates for one pass, and so would resume in the first. But `epoch` of the state is
    the passes that it made, plus the updates in this one over `max_steps`. Needed up to transformers 5.17 at least.
    """
    state = TrainerState.load_from_json(str(Path(checkpoint, TRAINER_STATE_NAME)))
    passes = math.ceil(state.epoch) - 1
    return passes, round((state.epoch - passes) * state.max_steps)


@functools.cache
def load_onto_numbered_cpus() -> None:
    """
    Let `torch.load` put tensors on "cpu:0", for which transformers asks where several processes on CPUs resume.

    Needed up to torch 2.13 and transformers 5.17 at least.
    """

    def restore(storage, location: str):
        return storage if location.startswith("cpu:") else None

    torch.serialization.register_package(0, lambda storage: None, restore)


@contextmanager
def keeping_modes(model: torch.nn.Module) -> Iterator[None]:
    """
    Put each module back in the mode in which it was, training or evaluation.

    With `use_transformers_continuous_batching`, TRL sets the model to training after each generation, those of an
    evaluation too, which would then be taken for training. Needed up to TRL 1.16 at least.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def keeping_frozen(model: torch.nn.Module) -> Iterator[None]:
    """
    Leave each parameter of the model trained or frozen, as it is.

    Whenever peft switches to an adapter, as TRL does to score the reference, it trains all of its parameters: those
    that a user had frozen get gradients, which no optimizer applies and no rank shares, and which count in the norm by
    which the others are clipped. Needed up to TRL 1.16 and peft 0.21 at least.
    """
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, requires_grad in before:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad = requires_grad


def end_training(trainer: Any) -> None:
    """
    Finish the trackers and leave the process group; the trainer cannot train afterwards.

    The distributed wrapper of the model is let go first: the last to hold the gloo process group, it would destroy it
    under Python's interpreter lock, for which a thread of the group may wait, so that the process hangs on exit (a
    third of two-process runs on CPUs, torch 2.13). vLLM's engine in this process destroys all groups, its own first:
    at exit, after the trainer's end, it fails ("Invalid process group specified", vLLM 0.31).
    """
    trainer.model_wrapped = trainer.model
    trainer.accelerator.free_memory()
    if getattr(trainer, "use_vllm", False) and trainer.vllm_mode == "colocate":
        trainer.vllm_generation.llm.llm_engine.engine_core.shutdown()
    trainer.accelerator.end_training()


def without_missing_images(inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """
    Return rows of a batch without any image such that TRL sees that there is none.

    For columns `images` and `image` of `None`, TRL 1.16 asks the tokenizer for pixels: `KeyError: 'pixel_values'`.
    """
    has_columns = not inputs[0].keys().isdisjoint({"images", "image"})
    has_images = any(row.get("images") or row.get("image") is not None for row in inputs)
    return [{**row, "images": []} for row in inputs] if has_columns and not has_images else inputs
