"""Forward passes besides those of the loss: what is random in them, and how they leave the model as it was."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from .fixes import keeping_modes


@contextmanager
def without_gradient_checkpointing(model: torch.nn.Module) -> Iterator[None]:
    """
    Switch gradient checkpointing off, and on again where it was on, by the switch of each layer.

    TRL does so by `gradient_checkpointing_enable`, which registers a further hook on the input embeddings every time;
    inside of this context it finds nothing to switch.
    """
    layers: list[Any] = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    for layer in layers:
        layer.gradient_checkpointing = False
    try:
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing = True


def forked_random_state(device: torch.device, model: torch.nn.Module) -> AbstractContextManager:
    """Give the random states of the CPU, of `device` and of those that a model is split over back as they were."""
    devices = {device, *(parameter.device for parameter in model.parameters())}
    own = sorted((each for each in devices if each.type == device.type != "cpu"), key=lambda each: each.index or 0)
    return torch.random.fork_rng(own, device_type=device.type)


@contextmanager
def in_eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put all modules in evaluation mode, and each back in the mode in which it was."""
    with keeping_modes(model):
        model.eval()
        yield


def has_random_forward(model: PreTrainedModel, neftune_noise_alpha: float | None = None) -> bool:
    """
    Tell whether two forward passes of the model in training mode may differ.

    Looks for dropout modules, for rates of dropout or jitter in the config and among the attributes of modules, which
    functional calls read, and for noise on the embeddings. Not measured: a fresh LoRA adapter hides its dropout until
    the first update. A rate in the config that the model does not use counts too.
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
