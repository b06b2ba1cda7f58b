"""What the clipped surrogate sees of one micro-batch: the carrier between TRL's batch and the bound search.

Pure: plain tensors and values in, tensors out. Legend: `B` rows, `T` completion tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch


WEIGHTINGS = ("uniform", "behavior_prob")

# Per-token values of TRL's batch, each with one at which a token of any weight adds nothing to the loss
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
    loss_type: str,
    importance_sampling_level: str = "token",
    weighting: str = "uniform",
    factors: Sequence[torch.Tensor] = (),
) -> PolicyTokens:
    """
    Compute the importance ratios of a micro-batch and the weight that the loss gives each token.

    The ratio is `exp(logp - old_logp)` for each token, or the exponential of its mean over the tokens of a row. The
    weight is the mask, divided by the row's number of tokens for the loss types `"grpo"` and `"sapo"`, times the
    factors, times the probability under the behaviour policy if asked for. Factors common to all tokens of the update
    (number of rows, of tokens, of micro-batches) are left out: the share of the positive tokens does not see them.

    The first two are `(B, T)`, of the policy that is trained and of the one that sampled each token; the advantages
    `(B,)` or `(B, T)`; the mask, `(B, T)`, is 1 for tokens that the loss counts. `importance_sampling_level` is
    `"token"` or `"sequence"`; with the `weighting` `"behavior_prob"`, a token is weighed by `exp(old_logp)` as Eq. 8
    prints it. `factors` are further ones of the token loss (entropy mask, off-policy mask, vLLM importance-sampling
    correction), `(B, T)` or `(B, 1)`. What is returned is detached from the graph.
    """
    log_ratio = per_token_logps.detach() - old_per_token_logps
    row_tokens = mask.sum(dim=1, keepdim=True).clamp(min=1.0)
    if importance_sampling_level == "sequence":
        log_ratio = (log_ratio * mask).sum(dim=1, keepdim=True) / row_tokens

    weights = mask / row_tokens if loss_type in ("grpo", "sapo") else mask.to(log_ratio.dtype)
    for factor in factors:
        weights = weights * factor
    if weighting == "behavior_prob":
        weights = weights * old_per_token_logps.exp()
    return PolicyTokens(log_ratio, log_ratio.exp(), advantages, weights, mask)


# Under a loss without clip bounds, a token of weight `w`, advantage `A` and ratio `r` has the gradient `w |A| size(r)`
# with respect to its log-probability; the size of VESPO is TRL's `GRPOTrainer.get_gamma_weights`


def cispo_gradient_size(ratio: torch.Tensor, cap: float) -> torch.Tensor:
    """
    Return `min(r, cap)`: CISPO keeps the gradient of every token, weighed by its capped ratio.

    References:
        https://huggingface.co/papers/2506.13585
    """
    return ratio.clamp(max=cap)


def sapo_gradient_size(
    ratio: torch.Tensor, advantages: torch.Tensor, temperature_pos: float, temperature_neg: float
) -> torch.Tensor:
    """
    Return `4 s (1 - s) r` with `s = sigmoid(temperature (r - 1))`, the derivative of SAPO's soft gate by `log r`.

    The sign of the advantages, of a shape that broadcasts with `ratio`, chooses the temperature.

    References:
        https://huggingface.co/papers/2511.20347
    """
    gate = torch.sigmoid(torch.where(advantages > 0, temperature_pos, temperature_neg) * (ratio - 1))
    return 4 * gate * (1 - gate) * ratio
