"""What the clipped surrogate sees of one micro-batch: the carrier between TRL's batch and the bound search.

Pure: plain tensors and values in, tensors out. Legend: `B` rows, `T` completion tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch


WEIGHTINGS = ("uniform", "behavior_prob")


def policy_mask(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return 1 for the completion tokens of TRL's batch that the policy wrote, not a tool; shape `(B, T)`."""
    return batch["completion_mask"] * batch.get("tool_mask", 1)


@dataclass(frozen=True)
class PolicyTokens:
    """
    Tokens of one micro-batch as the policy loss weighs them.

    Args:
        log_ratio (`torch.Tensor`):
            Log of the importance ratio, shape `(B, T)`, or `(B, 1)` where ratios are taken over sequences.
        ratio (`torch.Tensor`):
            Importance ratio `exp(log_ratio)`, same shape.
        advantages (`torch.Tensor`):
            Advantages, shape `(B,)` or `(B, T)`.
        weights (`torch.Tensor`):
            Weight of each token in the policy loss, shape `(B, T)`, at least 0, up to a factor common to the batch.
        mask (`torch.Tensor`):
            1 for tokens that the loss counts, 0 for padding and for tokens the policy did not write, shape `(B, T)`.
    """

    log_ratio: torch.Tensor
    ratio: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    mask: torch.Tensor

    @property
    def ratio_mask(self) -> torch.Tensor:
        """Which entries of `ratio` stand for something: tokens of the loss, or rows with at least one. Boolean."""
        mask = self.mask.bool()
        return mask if self.ratio.shape == mask.shape else mask.any(dim=1, keepdim=True)


def policy_tokens(
    per_token_logps: torch.Tensor,
    old_per_token_logps: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    loss_type: str,
    importance_sampling_level: str = "token",
    weighting: str = "uniform",
    factors: Sequence[torch.Tensor] = (),
) -> PolicyTokens:
    """
    Compute the importance ratios of a micro-batch and the weight that the loss gives each token.

    The ratio is `exp(logp - old_logp)` for each token, or the exponential of its mean over the tokens of a row. The
    weight is the mask, divided by the row's number of tokens for the loss type `"grpo"`, times the factors, times
    the probability under the behaviour policy if asked for. Factors common to all tokens of the update (number of
    rows, of tokens, of micro-batches) are left out: the share of the positive tokens does not see them.

    Args:
        per_token_logps (`torch.Tensor`):
            Log-probabilities under the policy that is trained, shape `(B, T)`.
        old_per_token_logps (`torch.Tensor`):
            Log-probabilities under the policy that sampled each token, shape `(B, T)`.
        advantages (`torch.Tensor`):
            Advantages, shape `(B,)` or `(B, T)`.
        mask (`torch.Tensor`):
            1 for tokens that the loss counts, else 0, shape `(B, T)`.
        loss_type (`str`):
            TRL's loss aggregation.
        importance_sampling_level (`str`, *optional*, defaults to `"token"`):
            `"token"` or `"sequence"`.
        weighting (`str`, *optional*, defaults to `"uniform"`):
            `"uniform"`, or `"behavior_prob"` to weigh each token by `exp(old_logp)` as Eq. 8 prints it.
        factors (sequence of `torch.Tensor`, *optional*):
            Further factors of the token loss (entropy mask, off-policy mask, vLLM importance-sampling correction),
            each of shape `(B, T)` or `(B, 1)`.

    Returns:
        [`PolicyTokens`], detached from the graph.
    """
    log_ratio = per_token_logps.detach() - old_per_token_logps
    row_tokens = mask.sum(dim=1, keepdim=True).clamp(min=1.0)
    if importance_sampling_level == "sequence":
        log_ratio = (log_ratio * mask).sum(dim=1, keepdim=True) / row_tokens

    weights = mask / row_tokens if loss_type == "grpo" else mask.to(log_ratio.dtype)
    for factor in factors:
        weights = weights * factor
    if weighting == "behavior_prob":
        weights = weights * old_per_token_logps.exp()
    return PolicyTokens(log_ratio, log_ratio.exp(), advantages, weights, mask)
