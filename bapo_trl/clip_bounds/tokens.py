"""
The tokens of one micro-batch as the policy loss weighs them: the carrier between a trainer's batch and the search.

Legend: `B` rows, `T` completion tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch


WEIGHTINGS = ("uniform", "behavior_prob")


@dataclass(frozen=True)
class PolicyTokens:
    """Tokens of one micro-batch as the policy loss weighs them."""

    log_ratio: torch.Tensor  # of importance, `(B, T)`, or `(B, 1)` where ratios are taken over sequences
    ratio: torch.Tensor  # `exp(log_ratio)`
    advantages: torch.Tensor  # `(B,)` or `(B, T)`
    weights: torch.Tensor  # in the policy loss, `(B, T)`, at least 0, up to a factor common to the batch
    mask: torch.Tensor  # `(B, T)`: 1 for tokens that the loss counts, 0 for padding and what the policy did not write
    # Under a loss without clip bounds: size of each token's gradient at weight and advantage 1, `(B, T)` or `(B, 1)`
    gradient_size: torch.Tensor | None = None
    # Log-probabilities by TRL's name, `(B, T)`, in which a NaN or an infinity stops the training
    log_probs: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def ratio_mask(self) -> torch.Tensor:
        """Which entries of `ratio` stand for something: tokens of the loss, or rows with at least one. Boolean."""
        mask = self.mask.bool()
        return mask if self.ratio.shape == mask.shape else mask.any(dim=1, keepdim=True)

    @property
    def column_advantages(self) -> torch.Tensor:
        """The advantages in two dimensions, `(B, 1)` or `(B, T)`."""
        return self.advantages if self.advantages.dim() == 2 else self.advantages.unsqueeze(1)

    def passes(self, low: torch.Tensor, high: torch.Tensor, delta: float | None = None) -> torch.Tensor:
        """
        Return which tokens have a gradient of the policy loss, boolean, shape `(B, T)`.

        The clip bounds, in ratio space, are not read under a loss without them. `delta` stops the tokens above it.
        """
        advantages = self.column_advantages
        counts = (self.weights > 0) & (advantages != 0)
        if self.gradient_size is not None:
            return counts & (self.gradient_size > 0)
        passes = torch.where(advantages > 0, self.ratio <= high, self.ratio >= low)
        return counts & passes if delta is None else counts & passes & (self.ratio <= delta)

    def balanced_advantages(self, negative_weight: torch.Tensor | float) -> torch.Tensor:
        """
        Return the advantages, those of negative tokens with a weight in (0, 1]; the shape is that of `advantages`.

        It scales the gradients of negative tokens and nothing else.
        """
        return torch.where(self.advantages < 0, self.advantages * negative_weight, self.advantages)


def policy_tokens(
    per_token_logps: torch.Tensor,
    old_per_token_logps: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    weighs_by_length: bool = False,
    importance_sampling_level: str = "token",
    weighting: str = "uniform",
    factors: Sequence[torch.Tensor] = (),
) -> PolicyTokens:
    """
    Compute the importance ratios of a micro-batch and the weight that the loss gives each token.

    The ratio is `exp(logp - old_logp)` for each token, or, with the `importance_sampling_level` `"sequence"`, the
    exponential of its mean over the tokens of a row. The weight is the mask, divided by the row's number of tokens if
    the loss `weighs_by_length`, times the factors of the token loss (entropy mask, off-policy mask, vLLM's
    correction), `(B, T)` or `(B, 1)`, and with the `weighting` `"behavior_prob"` times `exp(old_logp)`, as Eq. 8
    prints it. Factors common to all tokens of the update are left out: the share of the positive tokens does not see
    them. The other shapes are those of [`PolicyTokens`], and what is returned is detached from the graph.
    """
    log_ratio = per_token_logps.detach() - old_per_token_logps
    row_tokens = mask.sum(dim=1, keepdim=True).clamp(min=1.0)
    if importance_sampling_level == "sequence":
        log_ratio = (log_ratio * mask).sum(dim=1, keepdim=True) / row_tokens

    weights = mask / row_tokens if weighs_by_length else mask.to(log_ratio.dtype)
    for factor in factors:
        weights = weights * factor
    if weighting == "behavior_prob":
        weights = weights * old_per_token_logps.exp()
    return PolicyTokens(log_ratio, log_ratio.exp(), advantages, weights, mask)
