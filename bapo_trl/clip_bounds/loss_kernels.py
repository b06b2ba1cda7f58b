"""How large the gradient of a token's loss is under TRL's losses without clip bounds, as pure functions.

A token of weight `w`, advantage `A` and importance ratio `r` has the gradient `w |A| size(r)` with respect to its
log-probability. Under a clipped loss, the size is `r` where the bounds let it through, and 0 elsewhere. The losses
here have no bounds: each has a size of its own. That of VESPO is TRL's `GRPOTrainer.get_gamma_weights`.

Legend: `B` rows, `T` completion tokens.
"""

import torch


UNCLIPPED_LOSS_TYPES = ("cispo", "sapo", "vespo")
"""Loss types of TRL that have no clip bounds to search."""


def cispo_gradient_size(ratio: torch.Tensor, cap: float) -> torch.Tensor:
    """
    Return `min(r, cap)`: CISPO keeps the gradient of every token, weighed by its capped ratio.

    Args:
        ratio (`torch.Tensor`): Importance ratios, shape `(B, T)` or `(B, 1)`, at least 0.
        cap (`float`): TRL's `epsilon_high`, a ratio.

    References:
        https://huggingface.co/papers/2506.13585
    """
    return ratio.clamp(max=cap)


def sapo_gradient_size(
    ratio: torch.Tensor, advantages: torch.Tensor, temperature_pos: float, temperature_neg: float
) -> torch.Tensor:
    """
    Return `4 s (1 - s) r` with `s = sigmoid(temperature (r - 1))`, the derivative of SAPO's soft gate by `log r`.

    Args:
        ratio (`torch.Tensor`): Importance ratios, shape `(B, T)` or `(B, 1)`, at least 0.
        advantages (`torch.Tensor`): Advantages, of a shape that broadcasts with `ratio`. Their sign chooses the
            temperature.
        temperature_pos (`float`): Temperature of positive advantages.
        temperature_neg (`float`): Temperature of the others.

    References:
        https://huggingface.co/papers/2511.20347
    """
    gate = torch.sigmoid(torch.where(advantages > 0, temperature_pos, temperature_neg) * (ratio - 1))
    return 4 * gate * (1 - gate) * ratio
