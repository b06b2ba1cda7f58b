"""Log-probabilities of samples under the current policy, outside the loss."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..upstream.forward_passes import forked_random_state, in_eval_mode, without_gradient_checkpointing
from .policy_loss import forward_arguments
from .samples import pad_completions


# Likely text: in half precision, the rounding errors of unlikely tokens exceed the effect of padding
PROBE = "1+2=3, 2+3=5, 3+4=7, 4+5=9"


@torch.no_grad()
def score(
    trainer: Any, batch: Mapping[str, Any], compute_entropy: bool = False, batch_size: int | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log-probabilities and entropies, `(B, T)` each, of TRL's batch, `batch_size` samples at a time."""
    with without_gradient_checkpointing(trainer.model):
        arguments, named = forward_arguments(batch)
        named |= {"batch_size": batch_size, "compute_entropy": compute_entropy}
        logps, entropies, *_ = trainer._get_per_token_logps_and_entropies(trainer.model, *arguments, **named)
    return logps, entropies


def score_generation(trainer: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Return the log-probabilities of a batch, `(B, T)`, in forward passes of the size of a micro-batch."""
    return score(trainer, batch, batch_size=trainer.args.per_device_train_batch_size)[0]


def score_completions(trainer: Any, prompts: list[list[int]], completions: list[list[int]]) -> list[list[float]]:
    """Return the log-probabilities of the token ids of completions, padded, after their prompts."""
    return score_generation(trainer, pad_tokens(trainer, prompts, completions)).tolist()


def pad_tokens(trainer: Any, prompts: list[list[int]], completions: list[list[int]]) -> dict[str, torch.Tensor]:
    """Return a batch of token ids and masks on the trainer's device."""
    return pad_completions(prompts, completions, trainer._tokenizer.pad_token_id, trainer.accelerator.device)


def score_ahead(trainer: Any, micro_batches: Sequence[Mapping[str, Any]], compute_entropy: bool) -> list[tuple]:
    """Return log-probabilities and entropies of micro-batches, as their losses will compute them: same dropout."""
    # The losses run their forward passes in the same order, from the same random state
    with forked_random_state(trainer.accelerator.device, trainer.model):
        return [score(trainer, inputs, compute_entropy) for inputs in micro_batches]


def padding_counts(trainer: Any) -> bool:
    """
    Return whether padding before a prompt changes log-probabilities. All ranks make this call.

    Warns of it if samples are trained with other padding than they were scored with.
    """
    model, tokenizer = trainer.model, trainer._tokenizer
    tokens = tokenizer(PROBE)["input_ids"][:17]  # fits a small window
    if len(tokens) < 9:  # a vocabulary without digits
        tokens = [token % len(tokenizer) for token in range(17)]
    row = pad_tokens(trainer, [tokens[:1]], [tokens[1:]])
    padding = torch.full_like(row["completion_ids"][:, :8], tokenizer.pad_token_id)
    padded = row | {
        "prompt_ids": torch.cat([padding, row["prompt_ids"]], dim=1),
        "prompt_mask": torch.cat([torch.zeros_like(padding), row["prompt_mask"]], dim=1),
    }
    with in_eval_mode(model):  # without dropout
        alone, beside = score_generation(trainer, row), score_generation(trainer, padded)
    is_float32 = model.dtype == torch.float32 and trainer.accelerator.mixed_precision == "no"
    rounding = 0.01 if is_float32 else 0.1  # nats per token; half precision rounds logits to about 0.1
    counts = bool((alone - beside).abs().mean() > rounding)
    args = trainer.args
    if counts and trainer.accelerator.is_main_process and (args.uses_replay or args.uses_partial_rollouts):
        warnings.warn(
            f"The model ({model.config.model_type}) does not take positions from the attention mask: the "
            "log-probabilities of a sample depend on the padding before it. Samples from a replay buffer or from "
            "partial rollouts are trained with different padding than they were scored with, so their importance "
            "ratios are wrong. Use a model with relative positions, or prompts of equal length."
        )
    return counts
