"""Workarounds for problems in TRL, transformers, accelerate or torch, each with the versions that need it."""

import functools
import math
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from accelerate.utils import is_peft_model
from transformers import Trainer
from transformers.trainer_callback import ExportableState
from transformers.training_args import OptimizerNames

from ..errors import InputError
from ..inputs.prompt_checks import has_image
from .trl_compat import RepeatSampler


def skip_shuffles(sampler: RepeatSampler | None, epochs: int) -> None:
    """
    Continue the shuffling of the prompts where the checkpoint left off, after a number of epochs.

    TRL's sampler draws a permutation from its own generator at the start of each epoch. A resumed run creates a new
    sampler, which would begin with the permutation of the first epoch. Needed up to TRL 1.16 at least.
    """
    if sampler is not None and sampler.shuffle:
        for _ in range(epochs):
            torch.randperm(sampler.num_samples, generator=sampler.generator)


def reset_grpo_state(trainer: Any) -> None:
    """Reset the state that TRL initializes with the trainer but not for each run. Needed up to TRL 1.16 at least."""
    trainer._step, trainer._buffered_inputs = 0, None
    trainer.entropy_coef, trainer._last_world_entropy = trainer.args.entropy_coef, math.inf
    trainer._entropy_window_stats = None
    for left in (*trainer._metrics.values(), trainer._pending_metrics, trainer._pending_extra_logs):
        left.clear()


def replace_what_stdout_cannot_encode() -> None:
    """
    Print a replacement for characters that the encoding of stdout lacks.

    With `log_completions`, one such character ends the run. Needed up to TRL 1.16 at least.
    """
    if getattr(sys.stdout, "errors", None) in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]


def restore_callbacks(trainer: Trainer) -> None:
    """
    Restore the state of callbacks from a checkpoint, such as how long `EarlyStoppingCallback` has waited.

    transformers saves this state, but restores it only with `restore_callback_states_from_checkpoint`, which also
    replaces the callbacks' own settings. A callback that is not in the checkpoint would make the next save fail with
    a `KeyError`. Needed up to transformers 5.17 at least.
    """
    known: Any = trainer.state.stateful_callbacks
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ExportableState):
            saved = known.setdefault(type(callback).__name__, callback.state())
            if isinstance(saved, dict):  # of several callbacks of one class, it is a list
                for attribute, value in saved.get("attributes", {}).items():
                    setattr(callback, attribute, value)


def load_trained_adapter(trainer: Any, checkpoint: str) -> None:
    """
    Load the trained adapter if the reference is another adapter, as in a run on a saved adapter with `beta`.

    transformers finds the reference in a subfolder of the checkpoint, and then looks for all adapters in subfolders.
    But peft saves the trained adapter in the checkpoint folder itself. Needed up to transformers 5.17 at least.
    """
    if is_peft_model(trainer.model) and "ref" in trainer.model.peft_config and not trainer.is_fsdp_enabled:
        trainer.model.load_adapter(checkpoint, "default", is_trainable=True)


@contextmanager
def checking_optimizer(trainer: Trainer, checkpoint: str | None) -> Iterator[None]:
    """
    Compare the optimizer with its state in the checkpoint that is loaded in this context.

    Raise an `InputError` for the state of another optimizer: torch replaces the hyperparameters with the checkpoint's,
    whatever they are, and the first update then fails with a `KeyError`. Warn of another learning rate.
    """
    if checkpoint is None:
        yield
        return
    needed, rates = set(trainer.optimizer.param_groups[0]), list(getattr(trainer.lr_scheduler, "base_lrs", []))
    yield
    loaded = set(trainer.optimizer.param_groups[0])
    if not needed <= loaded:
        missing, others = (
            ", ".join(f"`{name}`" for name in sorted(each)) for each in (needed - loaded, loaded - needed)
        )
        kind = type(getattr(trainer.optimizer, "optimizer", trainer.optimizer)).__name__  # accelerate wraps it
        raise InputError(
            f"The optimizer is {kind} (`optim` is '{OptimizerNames(trainer.args.optim).value}'), but the checkpoint "
            f"{checkpoint} has the state of another one, without {missing}{f' and with {others}' if others else ''}. "
            "Set `optim` as in the run that saved it, or start a new run with the checkpoint's folder as the model."
        )
    loaded_rates = list(getattr(trainer.lr_scheduler, "base_lrs", []))
    if rates and rates != loaded_rates and trainer.accelerator.is_main_process:
        warnings.warn(
            f"The resumed run continues with the checkpoint's learning rate {loaded_rates[0]:g}, not `learning_rate` "
            f"{rates[0]:g}. To change the rate, start a new run with the checkpoint's folder as the model."
        )


@functools.cache
def load_onto_numbered_cpus() -> None:
    """
    Let `torch.load` put tensors on "cpu:0", which transformers requests when several processes resume on CPUs.

    Needed up to torch 2.13 and transformers 5.17 at least.
    """

    def restore(storage, location: str):
        return storage if location.startswith("cpu:") else None

    torch.serialization.register_package(0, lambda storage: None, restore)


@contextmanager
def restoring(objects: Iterable[Any], attribute: str) -> Iterator[None]:
    """Restore an attribute of each object after this context."""
    before = [(each, getattr(each, attribute)) for each in objects]
    try:
        yield
    finally:
        for each, value in before:
            if getattr(each, attribute) != value:
                setattr(each, attribute, value)


def keeping_modes(model: torch.nn.Module) -> AbstractContextManager:
    """
    Restore the mode of each module, training or evaluation.

    With `use_transformers_continuous_batching`, TRL puts the model into training mode after each generation, even
    during an evaluation, which would then be treated as training. Needed up to TRL 1.16 at least.
    """
    return restoring(model.modules(), "training")


def keeping_frozen(model: torch.nn.Module) -> AbstractContextManager:
    """
    Restore whether each parameter of the model is trained or frozen.

    When peft switches to an adapter, as TRL does to score the reference, it makes all parameters of the adapter
    trainable. Parameters that a user had frozen then get gradients, which no optimizer applies and no rank shares, but
    which count in the norm for gradient clipping. Needed up to TRL 1.16 and peft 0.21 at least.
    """
    return restoring(model.parameters(), "requires_grad")


@contextmanager
def keeping_types(model: torch.nn.Module) -> Iterator[None]:
    """
    Restore the type of each trained parameter.

    peft makes the adapter of a checkpoint float32, but TRL trains an adapter on quantized weights in bfloat16. So a
    resumed run would go on in another type. Needed up to peft 0.21 at least.
    """
    before = {name: parameter.dtype for name, parameter in model.named_parameters() if parameter.requires_grad}
    yield
    for name, dtype in before.items():
        parameter = model.get_parameter(name)
        parameter.data = parameter.data.to(dtype)


def end_training(trainer: Any) -> None:
    """
    Finish the trackers and leave the process group; the trainer cannot train afterwards.

    The distributed wrapper of the model is released first. As the last owner of the gloo process group, it would
    destroy the group while holding Python's interpreter lock. A thread of the group may wait for that lock, so that
    the process hangs on exit (a third of two-process runs on CPUs, torch 2.13). vLLM's engine in this process destroys
    all groups, its own first: at exit, after this function, it fails ("Invalid process group specified", vLLM 0.31).
    """
    trainer.model_wrapped = trainer.model
    trainer.accelerator.free_memory()
    if getattr(trainer, "use_vllm", False) and trainer.vllm_mode == "colocate":
        trainer.vllm_generation.llm.llm_engine.engine_core.shutdown()
    trainer.accelerator.end_training()


def without_missing_images(inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """
    Return the examples of a batch in a form in which TRL notices that no example has an image.

    If the columns `images` and `image` are `None`, TRL 1.16 fails with `KeyError: 'pixel_values'`.
    """
    has_columns = not inputs[0].keys().isdisjoint({"images", "image"})
    return [{**row, "images": []} for row in inputs] if has_columns and not any(map(has_image, inputs)) else inputs
