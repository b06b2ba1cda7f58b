"""All that a forward pass could leave behind on a model or in a process, to compare before and after."""

import random

import numpy as np
import torch


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def model_state(model: torch.nn.Module) -> dict[str, object]:
    """Return what a user would miss or find on the model afterwards, the weights aside."""
    modules, weights = dict(model.named_modules()), dict(model.named_parameters())
    return {
        "hooks": {f"{name}.{kind}": list(getattr(module, kind)) for name, module in modules.items() for kind in HOOKS},
        "attributes": {name: sorted(vars(module)) for name, module in modules.items()},
        "modes": {name: module.training for name, module in modules.items()},
        "checkpointing": {name: getattr(module, "gradient_checkpointing", None) for name, module in modules.items()},
        "trained": {name: weight.requires_grad for name, weight in weights.items()},
        "gradients": {
            name: None if weight.grad is None else weight.grad.numpy().tobytes() for name, weight in weights.items()
        },
    }


def random_state() -> dict[str, bytes]:
    """Return the state of each generator of random numbers."""
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": repr(random.getstate()).encode(),
        "numpy": repr(np.random.get_state(legacy=False)).encode() + np.random.get_state()[1].tobytes(),
    }
