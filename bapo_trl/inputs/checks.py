"""
What the trainer stops at, as TRL, transformers and torch would go on without a word.

Nothing of this communicates: an error of one rank ends that rank, and the launcher the others, as under TRL.
"""

import math
from typing import Any

from accelerate.utils import DistributedType, is_peft_model
from torch import nn
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

from ..errors import InputError
from .prompt_checks import TokenLimits


def check_optimizer(model: nn.Module, optimizer: Any) -> None:
    """
    Refuse an optimizer that trains no parameter of the model, before it is wrapped (`InputError`).

    Nothing else would notice: rewards, losses and often the norm of the gradient look as in any run.
    """
    parameters = list(model.parameters())
    trained = {id(parameter) for parameter in parameters if parameter.requires_grad}
    if not trained:
        fix = "Call `model.requires_grad_(True)`, or give a `peft_config` to train an adapter."
        if is_peft_model(model):
            fix = "Load the adapter with `is_trainable=True` in `PeftModel.from_pretrained`, or make it with a "
            fix += "configuration without `inference_mode`."
        raise InputError(
            f"Nothing would be trained: 0 of {len(parameters)} parameters of the model have `requires_grad`. {fix}"
        )
    # A layer whose adapter is merged passes the adapter by
    merged = [module for module in model.modules() if getattr(module, "merged", False)]
    if trained <= {id(parameter) for module in merged for parameter in module.parameters()}:
        raise InputError(
            f"Nothing would be trained: all {len(trained)} parameters that have `requires_grad` are those of an "
            "adapter that is merged into the weights: unmerge it first, with `PeftModel.unmerge_adapter`."
        )
    if isinstance(optimizer, LayerWiseDummyOptimizer):  # has one for each parameter, which it does not show
        return
    groups = getattr(optimizer, "param_groups", None) or [{"params": optimizer.params}]  # DeepSpeed's own
    if not any(id(parameter) in trained for group in groups for parameter in group["params"]):
        raise InputError(
            f"Nothing would be trained: the optimizer has 0 of the {len(trained)} parameters of the model that have "
            "`requires_grad`. Make it from the parameters of the very model that is given to the trainer (for an "
            "adapter, wrap that with `peft.get_peft_model` first, and give no `peft_config`), or leave `optimizers` "
            "out."
        )


def check_gradient(trainer: Any, grad_norm: Any) -> None:
    """
    Stop at a gradient that is not finite (`RuntimeError`). The norm is that of all ranks: all of them stop.

    Reads a number from the device. The vector of the update's log is read before it, ahead of the backward pass: in
    that, DeepSpeed makes its step.
    """
    # A loss scaler leaves out such an update itself
    if grad_norm is None or trainer.accelerator.mixed_precision == "fp16" or math.isfinite(grad_norm):
        return
    is_late = trainer.accelerator.distributed_type == DistributedType.DEEPSPEED  # which has made its step
    raise RuntimeError(
        f"NaN or infinity in the gradient (its norm is {float(grad_norm)}) at update "
        f"{trainer.state.global_step + 1}, {'in' if is_late else 'before'} its optimizer step: nothing of this "
        "update was saved. Look for a learning rate or a `beta` that is too high, or a loss that overflows, and "
        "resume from a checkpoint, or, for another rate, start from its folder as the model."
    )


def context_window(config: Any) -> int | None:
    """
    Return the tokens that prompt and completion may have, by a text model's configuration; `None` if it tells none.

    Rotary embeddings that are scaled reach `factor` times as far as the model was trained for.
    """
    window = getattr(config, "max_position_embeddings", None)
    if window is None:
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    trained = rope.get("original_max_position_embeddings") or window
    return max(window, int(trained * (rope.get("factor") or 1)))


def has_rotary_positions(config: Any) -> bool:
    """Return whether a text model goes on beyond its window, worse and worse; with learned positions, it fails."""
    return getattr(config, "rope_parameters", None) is not None


def token_limits(config: Any, max_completion_length: int | None) -> TokenLimits:
    """Return what a model takes, by the configuration of its text model."""
    return TokenLimits(context_window(config), max_completion_length or 0, getattr(config, "vocab_size", None))


def check_tokenizer(tokenizer: Any, vocabulary: int | None = None) -> None:
    """
    Refuse a tokenizer without an end token, or with more tokens than the model has (`InputError`).

    Tokens that were added to the tokenizer may go beyond the model's, as no prompt need have them.
    """
    if tokenizer.eos_token_id is None:
        raise InputError(
            "The tokenizer has no `eos_token`, so that no completion would end: set `tokenizer.eos_token` to the "
            "token that ends one (`eos_token` in the model's tokenizer_config.json)."
        )
    last = max(tokenizer.vocab_size - 1, tokenizer.eos_token_id, tokenizer.pad_token_id or 0)
    if vocabulary is not None and last >= vocabulary:
        raise InputError(
            f"The tokenizer has tokens up to {last}, but the model has {vocabulary} (`vocab_size`): take the "
            "tokenizer that belongs to the model, or make room with `model.resize_token_embeddings(len(tokenizer))`."
        )
