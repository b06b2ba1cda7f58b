"""Checks of the optimizer and the gradient, for problems that TRL would not report."""

import math
from typing import Any

from accelerate.utils import DistributedType, is_peft_model
from torch import nn
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

from ..errors import InputError


def check_optimizer(model: nn.Module, optimizer: Any) -> None:
    """
    Raise an `InputError` if the optimizer, not wrapped yet, trains no parameter of the model.

    Otherwise the run would look normal: rewards, losses and often the gradient norm do not show the problem.
    """
    parameters = list(model.parameters())
    trained = {id(parameter) for parameter in parameters if parameter.requires_grad}
    if not trained:
        fix = "Call `model.requires_grad_(True)`, or give a `peft_config` to train an adapter."
        if is_peft_model(model):
            fix = "Load the adapter with `PeftModel.from_pretrained(..., is_trainable=True)`, or create it with a "
            fix += "configuration without `inference_mode`."
        raise InputError(
            f"Nothing would be trained: none of the model's {len(parameters)} parameters has `requires_grad`. {fix}"
        )
    if isinstance(optimizer, LayerWiseDummyOptimizer):  # holds one optimizer per parameter, and does not expose them
        return
    groups = getattr(optimizer, "param_groups", None) or [{"params": optimizer.params}]  # DeepSpeed's own
    if not any(id(parameter) in trained for group in groups for parameter in group["params"]):
        raise InputError(
            f"Nothing would be trained: the optimizer has none of the model's {len(trained)} parameters with "
            "`requires_grad`. Create it from the parameters of the model that you pass to the trainer (with an "
            "adapter: after `peft.get_peft_model`, without `peft_config`), or leave out `optimizers`."
        )


def check_gradient(trainer: Any, grad_norm: Any) -> None:
    """
    Raise a `RuntimeError`, on all ranks, if the gradient is not finite: the norm is taken over all ranks.

    This copies a number from the device. The update's log is read earlier, before the backward pass, as DeepSpeed
    takes its optimizer step within the backward pass.
    """
    # In float16, the loss scaler skips the update
    if grad_norm is None or trainer.accelerator.mixed_precision == "fp16" or math.isfinite(grad_norm):
        return
    is_late = trainer.accelerator.distributed_type == DistributedType.DEEPSPEED  # it has taken its step already
    raise RuntimeError(
        f"NaN or infinity in the gradient (its norm is {float(grad_norm)}) at update "
        f"{trainer.state.global_step + 1}, {'in' if is_late else 'before'} its optimizer step: this update was not "
        "saved. Check whether `learning_rate` or `beta` is too high. Resume from a checkpoint or, to change the "
        "learning rate, start a new run with the checkpoint's folder as the model."
    )
