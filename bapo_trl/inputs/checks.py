"""What the trainer stops at or warns of, as TRL, transformers and torch would go on without a word."""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, is_peft_model
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

from ..batch.samples import pad_completions
from ..errors import InputError
from ..upstream.forward_passes import in_eval_mode
from .prompt_checks import TokenLimits


# Tokens that a language model finds likely: half precision rounds the logits of others by more than any padding does
PROBE = "1+2=3, 2+3=5, 3+4=7, 4+5=9"


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
            "`requires_grad`. Make it from the parameters of the model that the trainer gets (with an adapter: after "
            "`peft.get_peft_model`, without `peft_config`), or leave `optimizers` out."
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
        "update was saved. Look for a `learning_rate` or a `beta` that is too high, and resume from a checkpoint, or, "
        "for another rate, start from its folder as the model."
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


def warn_if_padding_counts(
    score: Callable[[Mapping[str, torch.Tensor]], torch.Tensor],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    accelerator: Accelerator,
) -> None:
    """Warn, in the main process. `score` returns log-probabilities of a batch; all ranks make this call together."""
    tokens = tokenizer(PROBE)["input_ids"][:17]  # a window may be small
    if len(tokens) < 9:  # a vocabulary without digits
        tokens = [token % len(tokenizer) for token in range(17)]
    row = pad_completions([tokens[:1]], [tokens[1:]], tokenizer.pad_token_id, accelerator.device)
    padding = torch.full_like(row["completion_ids"][:, :8], tokenizer.pad_token_id)
    padded = row | {
        "prompt_ids": torch.cat([padding, row["prompt_ids"]], dim=1),
        "prompt_mask": torch.cat([torch.zeros_like(padding), row["prompt_mask"]], dim=1),
    }
    with in_eval_mode(model):  # without dropout
        alone, beside = score(row), score(padded)
    is_float32 = model.dtype == torch.float32 and accelerator.mixed_precision == "no"
    rounding = 0.01 if is_float32 else 0.1  # nats a token; half precision rounds logits to about a tenth
    if (alone - beside).abs().mean() > rounding and accelerator.is_main_process:
        warnings.warn(
            f"The model ({model.config.model_type}) does not take positions from the attention mask: the "
            "log-probabilities of a sample change with the padding before it. Samples of a replay queue and of "
            "partial rollouts are trained with other padding than they were scored with, so that their "
            "importance ratios are wrong. Take a model with relative positions, or prompts of equal length."
        )
