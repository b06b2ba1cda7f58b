"""
The tokens of TRL's micro-batches as inputs of the policy loss: which tokens count, and with what weight.

Legend: `B` samples, `T` completion tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..clip_bounds import Contributions, size_contributions
from ..clip_bounds.tokens import PolicyTokens, policy_tokens
from .losses import LOSSES


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


class PolicyLoss:
    """
    Read the tokens of the policy loss, with the weights that TRL's `_compute_loss` gives them.

    `settings` are a [`~bapo_config.BAPOConfig`]. `off_policy_mask` and `entropy_mask` are TRL's `get_off_policy_mask`
    and `get_high_entropy_mask`. `score_ahead` takes micro-batches, and whether entropies are needed. It returns the
    log-probabilities and entropies, `(B, T)`, of each micro-batch under the current policy, as the losses will compute
    them. `is_random` says whether two forward passes may differ.
    """

    def __init__(
        self,
        settings: Any,
        *,
        score_ahead: Callable[[Sequence[Mapping[str, Any]], bool], list[tuple[torch.Tensor, torch.Tensor | None]]],
        off_policy_mask: Callable[..., torch.Tensor],
        entropy_mask: Callable[..., torch.Tensor],
        is_random: bool,
    ):
        self._settings, self._loss, self._is_random = settings, LOSSES[settings.loss_type], is_random
        self._score_ahead, self._off_policy_mask, self._entropy_mask = score_ahead, off_policy_mask, entropy_mask

    @torch.no_grad()
    def tokens(
        self, inputs: Mapping[str, Any], per_token_logps: torch.Tensor, entropies: torch.Tensor | None
    ) -> PolicyTokens:
        """Return the tokens of a micro-batch from the current policy's log-probabilities and entropies, `(B, T)`."""
        settings, mask, advantages = self._settings, policy_mask(inputs), inputs["advantages"]
        old_per_token_logps = known_old_logps(inputs, per_token_logps)
        factors = []
        if settings.off_policy_mask_threshold is not None:
            factors.append(
                self._off_policy_mask(
                    advantages=advantages if advantages.dim() == 2 else advantages.unsqueeze(1),
                    per_token_logps=per_token_logps,
                    sampling_per_token_logps=inputs.get("sampling_per_token_logps", old_per_token_logps),
                    mask=mask,
                    off_policy_threshold=settings.off_policy_mask_threshold,
                )
            )
        if settings.top_entropy_quantile < 1:
            factors.append(self._entropy_mask(entropies, mask, 1 - settings.top_entropy_quantile))
        tokens = self._weighed(inputs, per_token_logps, old_per_token_logps, factors)
        log_probs = {name: inputs[name] for name in ("old_per_token_logps", "ref_per_token_logps") if name in inputs}
        tokens = replace(tokens, log_probs={**log_probs, "per_token_logps": per_token_logps})
        if self._loss.gradient_size is None:
            return tokens
        size = self._loss.gradient_size(tokens, settings, inputs.get("importance_sampling_ratio"))
        return replace(tokens, gradient_size=size)

    def know_ratios(self, micro_batches: Sequence[Mapping[str, Any]], are_fresh: bool) -> bool:
        """
        Return whether the tokens of the micro-batches of the coming update are known without a forward pass.

        The ratios of fresh samples are 1: by definition without old log-probabilities, else if forward passes are not
        random.
        """
        if not micro_batches:
            return True
        batch, settings = micro_batches[0], self._settings
        # The off-policy mask compares log-probabilities with the sampler's
        masks = settings.off_policy_mask_threshold is not None and "sampling_per_token_logps" in batch
        reads_logps = masks or settings.contribution_weighting == "behavior_prob"
        has_logps = "old_per_token_logps" in batch
        are_known = not self._is_random if has_logps else not reads_logps
        return are_fresh and are_known and settings.top_entropy_quantile == 1

    @torch.no_grad()
    def tokens_ahead(self, micro_batches: Sequence[Mapping[str, Any]], are_fresh: bool) -> list[PolicyTokens]:
        """
        Return the tokens of the micro-batches of the coming update as their losses will see them.

        This takes a forward pass, unless they are known without one. `are_fresh`: the current policy sampled all.
        """
        micro_batches = [without_masked_values(inputs) for inputs in micro_batches]
        if self.know_ratios(micro_batches, are_fresh):
            return [self.tokens(inputs, _any_logps(inputs), None) for inputs in micro_batches]
        scores = self._score_ahead(micro_batches, self._settings.top_entropy_quantile < 1)
        return [
            self.tokens(inputs, mask_values(inputs, logps), entropies)
            for inputs, (logps, entropies) in zip(micro_batches, scores, strict=True)
        ]

    def total_absolute_advantages(self, inputs: Mapping[str, Any]) -> Contributions:
        """Return the sum of w |A| of each sign over a micro-batch, without factors that need a forward pass."""
        inputs = without_masked_values(inputs)
        logps = _any_logps(inputs)
        tokens = self._weighed(inputs, logps, logps, ())
        return size_contributions(torch.ones_like(tokens.ratio), tokens.advantages, tokens.weights)

    def _weighed(self, inputs, per_token_logps, old_per_token_logps, factors) -> PolicyTokens:
        is_of_sequences = self._loss.is_of_sequences
        if "importance_sampling_ratio" in inputs and not is_of_sequences:
            factors = [*factors, inputs["importance_sampling_ratio"]]
        return policy_tokens(
            per_token_logps,
            old_per_token_logps,
            inputs["advantages"],
            policy_mask(inputs),
            weighs_by_length=self._loss.weighs_by_length,
            importance_sampling_level="token" if is_of_sequences else self._settings.importance_sampling_level,
            weighting=self._settings.contribution_weighting,
            factors=factors,
        )


def _any_logps(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return log-probabilities for samples of the current policy, whose ratios are 1 whatever the values."""
    return known_old_logps(inputs, torch.zeros_like(inputs["completion_mask"], dtype=torch.float32))
