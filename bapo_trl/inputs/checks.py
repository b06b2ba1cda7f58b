"""
What the trainer stops at, as TRL, transformers and torch would go on without a word.

Nothing of this communicates: an error of one rank ends that rank, and the launcher the others, as under TRL.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import DistributedType, is_peft_model
from torch import nn
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

from ..batch.reward_sums import overflowing_groups
from ..errors import InputError
from .prompt_checks import TokenLimits
from .reward_checks import check_size_of_rewards, checked


@contextmanager
def explaining_broken_logits(update: int) -> Iterator[None]:
    """Say what to look for where torch finds no probabilities to sample from, after this update."""
    try:
        yield
    except RuntimeError as error:
        if not any(text in str(error) for text in ("probability tensor contains", "device-side assert")):  # CPU, CUDA
            raise
        raise RuntimeError(
            f"NaN or infinity in the logits while sampling, after update {update}: the model's weights are broken, or "
            "half precision overflows. Look at the weights that the run started from, for a learning rate that is too "
            "high, and resume from a checkpoint, or, for another rate, start from its folder as the model."
        ) from error


def check_rollouts(prompts: Sequence[Any], prompt_ids: Sequence[Any], completion_ids: Sequence[Any]) -> None:
    """Refuse more or fewer prompts or completions of a `rollout_func` than it was given prompts (`InputError`)."""
    if not len(prompts) == len(prompt_ids) == len(completion_ids):
        raise InputError(
            f"The `rollout_func` returned {len(prompt_ids)} `prompt_ids` and {len(completion_ids)} `completion_ids` "
            f"for {len(prompts)} prompts: return one for each."
        )


@contextmanager
def checking_rewards(trainer: Any, prompts: Sequence[Any], completions: Sequence[Any]) -> Iterator[None]:
    """Have what the trainer's reward functions return checked within (see [`~reward_checks.checked`])."""
    functions = trainer.reward_funcs
    trainer.reward_funcs = [
        function if isinstance(function, nn.Module) else checked(function, name, prompts, completions)
        for function, name in zip(functions, trainer.reward_func_names, strict=True)
    ]
    try:
        yield
    finally:
        trainer.reward_funcs = functions


def check_rewards(trainer: Any, rewards_per_func: torch.Tensor, prompts: Sequence[Any], completions: Sequence[Any]):
    """Refuse rewards of all ranks, `(B, F)`, of which TRL would make undefined or no advantages (`InputError`)."""

    def overflows(rewards: torch.Tensor) -> torch.Tensor:
        weights, count = trainer.reward_weights.to(rewards.device), trainer.num_generations
        summed_first = trainer.args.sums_rewards_first
        return overflowing_groups(rewards, weights, count, trainer.scale_rewards, summed_first)

    check_size_of_rewards(
        rewards_per_func,
        overflows if trainer.model.training else None,  # an evaluation makes no advantages
        trainer.reward_func_names,
        prompts,
        completions,
        trainer.accelerator.process_index,
    )


def check_optimizer(model: nn.Module, optimizer: Any) -> None:
    """
    Refuse an optimizer that trains no parameter of the model, before it is wrapped (`InputError`).

    Nothing else would notice: rewards, losses and often the norm of the gradient look as in any run.
    """
    parameters = list(model.parameters())
    trained = {id(parameter) for parameter in parameters if parameter.requires_grad}
    # A layer whose adapter is merged passes the adapter by
    merged = [module for module in model.modules() if getattr(module, "merged", False)]
    trained_beside = trained - {id(parameter) for module in merged for parameter in module.parameters()}
    if trained and not trained_beside:
        raise InputError(
            f"Nothing would be trained: all {len(trained)} parameters that have `requires_grad` are those of an "
            "adapter that is merged into the weights: unmerge it first, with `PeftModel.unmerge_adapter`."
        )
    if not trained:
        fix = "Call `model.requires_grad_(True)`, or give a `peft_config` to train an adapter."
        if is_peft_model(model):
            fix = "Load the adapter with `is_trainable=True` in `PeftModel.from_pretrained`, or make it with a "
            fix += "configuration without `inference_mode`."
        raise InputError(
            f"Nothing would be trained: 0 of {len(parameters)} parameters of the model have `requires_grad`. {fix}"
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
    rope = getattr(config, "rope_parameters", None) or {}
    if window is None or any(isinstance(value, dict) for value in rope.values()):  # those of each kind of layer
        return window
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

    Tokens that were added to the tokenizer may go beyond the model's: prompts with such a token are refused.
    """
    if tokenizer.eos_token_id is None:
        raise InputError(
            "The tokenizer has no `eos_token`, so that no completion would end: set `tokenizer.eos_token` to the "
            "token that ends one (`eos_token` in the model's tokenizer_config.json)."
        )
    if vocabulary is None:
        return
    last = max(tokenizer.vocab_size - 1, tokenizer.eos_token_id, tokenizer.pad_token_id or 0)
    if last >= vocabulary:
        raise InputError(
            f"The tokenizer has tokens up to {last}, but the model has {vocabulary} (`vocab_size`): take the "
            "tokenizer that belongs to the model, or make room with `model.resize_token_embeddings(len(tokenizer))`."
        )
