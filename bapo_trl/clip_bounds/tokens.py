"""
The tokens of one micro-batch with their weights in the policy loss: the input of the bound search.

Legend: `B` samples, `T` completion tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch


WEIGHTINGS = ("uniform", "behavior_prob")


@dataclass(frozen=True)
class PolicyTokens:
    """Tokens of one micro-batch with their weights in the policy loss."""

    log_ratio: torch.Tensor  # log importance ratio, `(B, T)`, or `(B, 1)` for sequence-level ratios
    ratio: torch.Tensor  # `exp(log_ratio)`
    advantages: torch.Tensor  # `(B,)` or `(B, T)`
    weights: torch.Tensor  # in the policy loss, `(B, T)`, at least 0, up to a factor common to the batch
    mask: torch.Tensor  # `(B, T)`: 1 for tokens of the loss, 0 for padding and tokens that the policy did not write
    # Under a loss without clip bounds: size of each token's gradient at weight and advantage 1, `(B, T)` or `(B, 1)`
    gradient_size: torch.Tensor | None = None
    # Log-probabilities by TRL's name, `(B, T)`, in which a NaN or an infinity stops the training
    log_probs: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def ratio_mask(self) -> torch.Tensor:
        """Boolean mask of the valid entries of `ratio`: tokens of the loss, or samples with at least one."""
        mask = self.mask.bool()
        return mask if self.ratio.shape == mask.shape else mask.any(dim=1, keepdim=True)

    @property
    def column_advantages(self) -> torch.Tensor:
        """The advantages in two dimensions, `(B, 1)` or `(B, T)`."""
        return self.advantages if self.advantages.dim() == 2 else self.advantages.unsqueeze(1)

    def passes(self, low: torch.Tensor, high: torch.Tensor, delta: float | None = None) -> torch.Tensor:
        """
        Return which tokens have a gradient of the policy loss, boolean, shape `(B, T)`.

        The clip bounds are in ratio space, and ignored for a loss without them. Tokens with a ratio above `delta` have
        no gradient.
        """
        advantages = self.column_advantages
        counts = (self.weights > 0) & (advantages != 0)
        if self.gradient_size is not None:
            return counts & (self.gradient_size > 0)
        passes = torch.where(advantages > 0, self.ratio <= high, self.ratio >= low)
        return counts & passes if delta is None else counts & passes & (self.ratio <= delta)

    def balanced_advantages(self, negative_weight: torch.Tensor | float) -> torch.Tensor:
        """
        Return the advantages, with the negative ones multiplied by a weight in (0, 1]; the shape stays the same.

        This scales the gradients of negative tokens and nothing else.
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

    The ratio is `exp(logp - old_logp)` for each token. With `importance_sampling_level` `"sequence"`, it is the
    exponential of the mean of `logp - old_logp` over the tokens of a sample. The weight is the mask, divided by the
    sample's number of tokens if the loss `weighs_by_length`, times the factors of the token loss (entropy mask,
    off-policy mask, vLLM's correction), `(B, T)` or `(B, 1)`. The `weighting` `"behavior_prob"` multiplies it by
    `exp(old_logp)`, as in Eq. 8. Factors common to all tokens of the update are left out: they do not change the
    positive contribution. Other shapes are as in [`PolicyTokens`]. The result is detached from the graph.
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
