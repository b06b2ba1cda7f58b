"""Injected rollouts: completions that were generated elsewhere, passed to TRL in place of its own."""

from dataclasses import KW_ONLY, dataclass
from typing import Any

from .samples import attach_rollouts


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
        """Return TRL's batch with log-probabilities and versions of its tokens; see `attach_rollouts`."""
        return attach_rollouts(batch, self.behavior_logps, self.versions, num_rows)
