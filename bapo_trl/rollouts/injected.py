"""Injected rollouts: completions that were generated elsewhere, passed to TRL in place of its own."""

import copy
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from ..batch.samples import attach_rollouts
from ..errors import InputError
from .pool import Group


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

    @classmethod
    def of_groups(cls, groups: Iterable[Group]) -> "InjectedRollouts":
        """Return the completions of one or more complete groups."""
        samples = [(group, completion) for group in groups for completion in group.completions]
        reports_logps = bool(samples[0][1].sampler_logps)
        return cls(
            [copy.deepcopy(group.inputs) for group, _ in samples],
            [list(group.prompt_ids) for group, _ in samples],
            [list(each.tokens) for _, each in samples],
            behavior_logps=[each.logps for _, each in samples],
            versions=[each.versions for _, each in samples],
            sampler_logps=[list(each.sampler_logps) for _, each in samples] if reports_logps else None,
        )

    def __len__(self) -> int:
        return len(self.token_ids)

    def attach_to(self, batch: dict[str, Any], num_rows: int) -> dict[str, Any]:
        """Return TRL's batch with log-probabilities and versions of its tokens; see `attach_rollouts`."""
        return attach_rollouts(batch, self.behavior_logps, self.versions, num_rows)


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
