"""Log-probabilities of samples under the current policy, outside the loss."""

from typing import Any

import torch

from ..upstream.forward_passes import forked_random_state, without_gradient_checkpointing
from .policy_loss import forward_arguments
from .samples import pad_completions


@torch.no_grad()
def score(
    trainer: Any, batch: dict[str, Any], compute_entropy: bool = False, batch_size: int | None = None
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


def score_ahead(trainer: Any, micro_batches: list[dict[str, Any]], compute_entropy: bool) -> list[tuple]:
    """Return log-probabilities and entropies of micro-batches, as their losses will compute them: same dropout."""
    # The losses run their forward passes in the same order, from the same random state
    with forked_random_state(trainer.accelerator.device, trainer.model):
        return [score(trainer, inputs, compute_entropy) for inputs in micro_batches]
