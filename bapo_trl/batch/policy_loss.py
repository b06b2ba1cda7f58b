"""
The tokens of TRL's micro-batches as inputs of the policy loss: which tokens count, and with what weight.

Legend: `B` samples, `T` completion tokens.
"""

from collections.abc import Mapping
from typing import Any

import torch


FORWARD_KEYS = (
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
    "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip
"""Keys of TRL's batch that go into the model's forward as they are."""

# Per-token values of TRL's batch, each with the value at which a token adds nothing to the loss, whatever its weight
_NEUTRAL_VALUES = {
    "old_per_token_logps": 0.0, "ref_per_token_logps": 0.0, "sampling_per_token_logps": 0.0,
    "importance_sampling_ratio": 1.0,
}  # fmt: skip


def policy_mask(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return 1 for the completion tokens of TRL's batch that the policy wrote, not a tool; shape `(B, T)`."""
    return batch["completion_mask"] * batch.get("tool_mask", 1)


def without_masked_values(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """
    Return a copy of TRL's batch in which masked tokens have a log-probability of 0 under every policy.

    With [`mask_values`] on the current log-probabilities, their importance ratio is 1 and their KL term 0. The loss
    multiplies both by 0, which would not remove an infinite ratio or a NaN.
    """
    neutral = {key: value for key, value in _NEUTRAL_VALUES.items() if key in batch}
    return {**batch, **{key: mask_values(batch, batch[key], value) for key, value in neutral.items()}}


def mask_values(batch: Mapping[str, torch.Tensor], values: torch.Tensor, neutral: float = 0.0) -> torch.Tensor:
    """Return values of the tokens of TRL's batch, `(B, T)`, with `neutral` for masked ones; `(B, 1)` as it is."""
    mask = policy_mask(batch).bool()
    return torch.where(mask, values, neutral) if values.shape == mask.shape else values


def known_old_logps(inputs: Mapping[str, torch.Tensor], per_token_logps: torch.Tensor) -> torch.Tensor:
    """
    Return the log-probabilities of TRL's batch under the policy that sampled it, or else the current ones, `(B, T)`.

    TRL omits them in a run that looks on-policy. A sampler's log-probabilities are NaN for tokens without one.
    """
    if "old_per_token_logps" not in inputs:
        return per_token_logps
    old_per_token_logps = inputs["old_per_token_logps"]
    if "sampling_per_token_logps" not in inputs:
        return old_per_token_logps  # the trainer's own, in which a NaN stops the training
    is_unknown = old_per_token_logps.isnan() & inputs["sampling_per_token_logps"].isnan()
    return torch.where(is_unknown, per_token_logps, old_per_token_logps)


def forward_arguments(batch: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and keyword arguments of TRL's `_get_per_token_logps_and_entropies`, without the model."""
    input_ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    attention_mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    named = {key: batch.get(key) for key in FORWARD_KEYS}
    return [input_ids, attention_mask, batch["completion_ids"].size(1)], named
