"""Helpers for forward passes besides those of the loss, which must not change the model or the random state."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from .fixes import keeping_modes, restoring


@contextmanager
def without_gradient_checkpointing(model: torch.nn.Module) -> Iterator[None]:
    """
    Turn gradient checkpointing off for each layer, and restore it afterwards.

    TRL uses `gradient_checkpointing_enable`, which registers another hook on the input embeddings each time. Inside
    this context, TRL finds nothing to turn off.
    """
    layers: list[Any] = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    with restoring(layers, "gradient_checkpointing"):
        for layer in layers:
            layer.gradient_checkpointing = False
        yield


def forked_random_state(device: torch.device, model: torch.nn.Module) -> AbstractContextManager:
    """Restore the random states of the CPU, `device` and all devices of the model after the context."""
    devices = {device, *(parameter.device for parameter in model.parameters())}
    own = sorted((each for each in devices if each.type == device.type != "cpu"), key=lambda each: each.index or 0)
    return torch.random.fork_rng(own, device_type=device.type)


@contextmanager
def in_eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put all modules in evaluation mode, and restore the mode of each afterwards."""
    with keeping_modes(model):
        model.eval()
        yield


def has_random_forward(model: PreTrainedModel, neftune_noise_alpha: float | None = None) -> bool:
    """
    Return whether two forward passes of the model in training mode may differ.

    Checks for dropout modules, for rates of dropout or jitter in the config and the attributes of modules, which
    functional calls use, and for noise on the embeddings. A comparison of two passes would miss the dropout of a fresh
    LoRA adapter, which has no effect before the first update. A rate that the model does not use counts too.
    """
    modules = list(model.modules())
    return (
        bool(neftune_noise_alpha)
        or _has_rate(model.config.to_dict())
        or any(_has_rate(vars(module)) for module in modules)
        or any("Dropout" in type(module).__name__ and getattr(module, "p", 0) > 0 for module in modules)
    )


def _has_rate(settings: Mapping, are_rates: bool = False) -> bool:
    for name, value in settings.items():
        is_rate = are_rates or "drop" in str(name) or "jitter" in str(name)
        if isinstance(value, Mapping):  # a sub-config; the rates of LoHa and LoKr, one for each adapter
            if _has_rate(value, is_rate):
                return True
        elif is_rate and isinstance(value, int | float) and value > 0:
            return True
    return False
