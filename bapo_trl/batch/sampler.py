"""What the sampler says of TRL's batch, beside what the trainer says."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .policy_loss import policy_mask


@dataclass(frozen=True)
class SamplerLogps:
    """Log-probabilities of the tokens just sampled, by trainer and sampler; `(B, T)` each."""

    trainer: torch.Tensor
    sampler: torch.Tensor  # NaN where the sampler gave none
    mask: torch.Tensor  # boolean: the tokens that the policy wrote
    latest: torch.Tensor  # boolean: those of each sample's latest segment, sampled and scored under the same weights
    correction: torch.Tensor | None  # TRL's importance-sampling ratio, of sequences `(B, 1)` or of tokens


def has_sampler_logps(batch: Mapping[str, torch.Tensor]) -> bool:
    """Return whether TRL's batch has log-probabilities of a sampler."""
    return "sampling_per_token_logps" in batch


def read_sampler_logps(batch: Mapping[str, torch.Tensor], trainer_logps: torch.Tensor) -> SamplerLogps:
    """Return those of TRL's batch, which has some; `trainer_logps` are the trainer's, `(B, T)`."""
    mask = latest = policy_mask(batch).bool()
    if "token_versions" in batch:
        versions = batch["token_versions"]
        latest = mask & (versions == versions.amax(dim=1, keepdim=True))
    correction = batch.get("importance_sampling_ratio")
    return SamplerLogps(trainer_logps, batch["sampling_per_token_logps"], mask, latest, correction)


def drop_sampler_logps(batch: dict[str, Any]) -> None:
    """Remove what a `rollout_func` gave as log-probabilities of a sampler, where nothing reads them."""
    batch.pop("sampling_per_token_logps", None)


def behavior_logps(
    batch: dict[str, torch.Tensor], score: Callable[[dict[str, torch.Tensor]], torch.Tensor], keeps: bool
) -> torch.Tensor:
    """
    Return the log-probabilities of TRL's batch under the policy that sampled it, `(B, T)`; with `keeps`, add them.

    TRL leaves them out where it sees an on-policy run, and takes all ratios to be 1: `score` returns them then.
    """
    logps = batch["old_per_token_logps"] if "old_per_token_logps" in batch else score(batch)
    if keeps:
        batch["old_per_token_logps"] = logps
    return logps


def sampled_sequences(batch: Mapping[str, torch.Tensor], most: int) -> list[torch.Tensor]:
    """Return the token ids, of prompt and completion, of at most so many samples spread over TRL's batch."""
    count = len(batch["prompt_ids"])
    return [
        torch.cat([batch[f"{part}_ids"][row][batch[f"{part}_mask"][row].bool()] for part in ("prompt", "completion")])
        for row in range(0, count, math.ceil(count / most))
    ]
