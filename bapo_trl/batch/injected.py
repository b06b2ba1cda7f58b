"""Injected rollouts: completions that were generated elsewhere, passed to TRL in place of its own."""

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from ..errors import InputError
from .samples import pad_logps


@dataclass
class InjectedRollouts:
    """
    Completions for TRL's `_generate_and_score_completions`, one per sample, sorted by group.

    While they are injected, the trainer answers three of TRL's calls from here: `_tokenize_prompts` with the prompts,
    `_generate_single_turn` with the token ids and the sampler's log-probabilities, and the scoring of the completions
    with the behaviour log-probabilities.
    """

    inputs: list[dict[str, Any]]  # examples of the dataset
    prompt_ids: list[list[int]]
    token_ids: list[list[int]]
    _: KW_ONLY
    behavior_logps: list[list[float | None]]  # of each token, under the policy that sampled it; `None`: not known
    versions: list[list[int]]  # policy version that sampled each token
    sampler_logps: list[list[float | None]] | None  # of each token; `None` if the sampler reports none
    is_ahead: bool = False  # whether they were requested one generation step ago, from an earlier policy

    def __len__(self) -> int:
        return len(self.token_ids)

    def attach_to(self, batch: dict[str, Any], num_rows: int) -> dict[str, Any]:
        """
        Return TRL's batch with log-probabilities and policy versions of its tokens, filled up to `num_rows` samples.

        It has the oldest policy version of each sample and the version of each token. Fillers are fully masked copies.
        """
        device, num_tokens = batch["completion_ids"].device, batch["completion_ids"].size(1)
        of_tokens = [[*row, *row[-1:] * (num_tokens - len(row))] for row in self.versions]
        batch = {
            **batch,
            "old_per_token_logps": pad_logps(self.behavior_logps, num_tokens).to(device),
            "policy_version": torch.tensor([row[0] for row in self.versions], device=device),
            "token_versions": torch.tensor(of_tokens, device=device),
        }
        rows = torch.arange(num_rows) % len(self)
        filled = {
            key: value[rows.to(value.device)] if isinstance(value, torch.Tensor) and value.dim() else value
            for key, value in batch.items()
        }
        filled["completion_mask"][len(self) :] = 0
        return filled


def check_token_ids_suffice(trainer: Any, feature: str, fix: str) -> None:
    """Raise an `InputError` if completions consist of more than token ids: nothing else can be injected."""
    reasons = {
        "`tools`": bool(trainer.tools),
        "`environment_factory`": trainer.environment_factories is not None,
        "`rollout_func`": trainer.rollout_func is not None,
        "a model that takes images": trainer._is_vlm,
    }
    for name, is_there in reasons.items():
        if is_there:
            raise InputError(
                f"The trainer has {name}, which {feature} cannot handle, since only the token ids of a completion are "
                f"kept: remove it, or set {fix}."
            )
