"""The sampler's log-probabilities in TRL's batch, for a comparison with the trainer's."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .policy_loss import policy_mask


@dataclass(frozen=True)
class SamplerLogps:
    """Log-probabilities of the tokens just sampled, from trainer and sampler; `(B, T)` each."""

    trainer: torch.Tensor
    sampler: torch.Tensor  # NaN where the sampler gave none
    mask: torch.Tensor  # boolean: the tokens that the policy wrote
    latest: torch.Tensor  # boolean: tokens of each sample's latest segment, sampled and scored under the same weights
    correction: torch.Tensor | None  # TRL's importance-sampling ratio, per sequence `(B, 1)` or per token


def has_sampler_logps(batch: Mapping[str, torch.Tensor]) -> bool:
    """Return whether TRL's batch has the log-probabilities of a sampler."""
    return "sampling_per_token_logps" in batch


def read_sampler_logps(batch: Mapping[str, torch.Tensor], trainer_logps: torch.Tensor) -> SamplerLogps:
    """Return the sampler's log-probabilities in TRL's batch beside the trainer's, `(B, T)`."""
    mask = latest = policy_mask(batch).bool()
    if "token_versions" in batch:
        versions = batch["token_versions"]
        latest = mask & (versions == versions.amax(dim=1, keepdim=True))
    correction = batch.get("importance_sampling_ratio")
    return SamplerLogps(trainer_logps, batch["sampling_per_token_logps"], mask, latest, correction)


def drop_sampler_logps(batch: dict[str, Any]) -> None:
    """Remove the sampler log-probabilities of a `rollout_func`, which nothing reads."""
    batch.pop("sampling_per_token_logps", None)


def behavior_logps(
    batch: dict[str, torch.Tensor], score: Callable[[dict[str, torch.Tensor]], torch.Tensor], keeps: bool
) -> torch.Tensor:
    """
    Return the log-probabilities of TRL's batch under the policy that sampled it, `(B, T)`; `keeps` adds them to it.

    TRL omits them in a run that looks on-policy, and assumes ratios of 1. They are then computed by `score`.
    """
    logps = batch["old_per_token_logps"] if "old_per_token_logps" in batch else score(batch)
    if keeps:
        batch["old_per_token_logps"] = logps
    return logps


def sampled_sequences(batch: Mapping[str, torch.Tensor], most: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """
    Return up to `most` samples spread over TRL's batch: the token ids of prompt and completion, `(N,)`, and which of
    them the policy wrote.
    """
    count = len(batch["prompt_ids"])
    ids, written, is_there = (
        torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
        torch.cat([torch.zeros_like(batch["prompt_mask"]), policy_mask(batch)], dim=1).bool(),
        torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1).bool(),
    )
    return [(ids[row][is_there[row]], written[row][is_there[row]]) for row in range(0, count, math.ceil(count / most))]
