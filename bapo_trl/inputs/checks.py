"""Checks of the optimizer and the gradient, for problems that TRL would not report, and of the reference model."""

import math
import warnings
from statistics import fmean
from typing import Any

from accelerate.utils import DistributedType, is_peft_model
from torch import nn
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

from ..errors import InputError
from ..upstream.forward_passes import has_random_forward
from ..upstream.trl_compat import get_config_model_id


LARGEST_FIRST_KL = 0.01  # nats per token. Rounding in half precision changes log-probabilities by up to about 0.1


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
    # A layer with a merged adapter does not use the adapter's own weights
    merged = [module for module in model.modules() if getattr(module, "merged", False)]
    if trained <= {id(parameter) for module in merged for parameter in module.parameters()}:
        raise InputError(
            f"Nothing would be trained: all {len(trained)} parameters with `requires_grad` belong to an adapter that "
            "is merged into the weights. Unmerge it first, with `PeftModel.unmerge_adapter`."
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


def warn_if_reference_differs(trainer: Any) -> None:
    """
    Warn if the KL to the reference model, of each micro-batch of a run's first update, is not about 0.

    Prompts that are tuned, dropout, and noise on the embeddings make a difference of their own. TRL has loaded the
    reference from the model's folder; with a new adapter, the reference is the model without it.
    """
    model, folder = trainer.model, get_config_model_id(trainer.model.config)
    configs = model.peft_config.values() if is_peft_model(model) else ()
    kl = [value for value in trainer._metrics["train"].get("kl", []) if value == value]
    mean = fmean(kl) if kl else 0.0
    differs = any(config.is_prompt_learning for config in configs)
    if mean <= LARGEST_FIRST_KL or differs or has_random_forward(model, trainer.neftune_noise_alpha):
        return
    source = f"{folder!r} without the new adapter" if trainer.ref_model is None else f"loaded from {folder!r}"
    warnings.warn(
        f"The KL between policy and reference model is {mean:.3g} at the first update, not about 0: the reference "
        f"model, {source}, is not the model that is trained. The KL penalty (`beta`) pulls the policy towards it. If "
        "you merged an adapter or trained the model in memory, save it with `save_pretrained`, and load it from that "
        "folder."
    )
