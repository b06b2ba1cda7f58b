"""
The properties of each `loss_type` of TRL that the bound search, the replay buffer and the log depend on.

Legend: `B` samples, `T` completion tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch


if TYPE_CHECKING:
    from ..clip_bounds.tokens import PolicyTokens


@dataclass(frozen=True)
class Loss:
    """Properties of one loss."""

    mean_over: str  # what TRL averages over: "samples" or "tokens" of a micro-batch, or tokens of a "generation" step
    weighs_by_length: bool = False  # a token has the weight 1 / (number of tokens of its sample), rather than 1
    # Computes the size of each token's gradient with respect to its log-probability at weight and advantage 1,
    # `(B, T)` or `(B, 1)`, from the tokens, a `BAPOConfig` and vLLM's importance-sampling correction, if any. `None`
    # for a loss with clip bounds: the size is then the ratio, unless it is clipped
    gradient_size: Callable[["PolicyTokens", Any, torch.Tensor | None], torch.Tensor] | None = None
    has_ratio_cap: bool = False  # `epsilon_high` caps the ratio
    is_of_sequences: bool = False  # computes sequence-level ratios and applies vLLM's correction itself

    @property
    def has_clip_bounds(self) -> bool:
        """Whether the loss clips ratios, so that there are bounds to search."""
        return self.gradient_size is None


def _cispo_gradient_size(tokens: "PolicyTokens", settings: Any, correction: torch.Tensor | None) -> torch.Tensor:
    """Return `min(r, cap)`, https://huggingface.co/papers/2506.13585."""
    # As TRL: `epsilon` stands in for an `epsilon_high` that is not set
    cap = settings.epsilon if settings.epsilon_high is None else settings.epsilon_high
    return tokens.ratio.clamp(max=cap)


def _sapo_gradient_size(tokens: "PolicyTokens", settings: Any, correction: torch.Tensor | None) -> torch.Tensor:
    """
    Return `4 s (1 - s) r` with `s = sigmoid(temperature (r - 1))`, the derivative of SAPO's soft gate by `log r`.

    The sign of the advantage chooses the temperature, https://huggingface.co/papers/2511.20347.
    """
    positive, negative = settings.sapo_temperature_pos, settings.sapo_temperature_neg
    gate = torch.sigmoid(torch.where(tokens.column_advantages > 0, positive, negative) * (tokens.ratio - 1))
    return 4 * gate * (1 - gate) * tokens.ratio


def _vespo_gradient_size(tokens: "PolicyTokens", settings: Any, correction: torch.Tensor | None) -> torch.Tensor:
    """Return TRL's `GRPOTrainer.get_gamma_weights`: VESPO's weight of each sequence."""
    from trl import GRPOTrainer  # not needed to check settings

    names = ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
    return GRPOTrainer.get_gamma_weights(
        advantages=tokens.column_advantages,
        log_ratio_per_token=tokens.log_ratio,
        mask=tokens.mask,
        importance_sampling_ratio=correction,
        **{name: getattr(settings, f"vespo_{name}") for name in names},
    )


LOSSES: Mapping[str, Loss] = MappingProxyType(
    {
        "grpo": Loss("samples", weighs_by_length=True),
        "bnpo": Loss("tokens"),
        "dr_grpo": Loss("samples"),
        "dapo": Loss("generation"),
        "luspo": Loss("samples"),
        "cispo": Loss("generation", gradient_size=_cispo_gradient_size, has_ratio_cap=True),
        "sapo": Loss("samples", weighs_by_length=True, gradient_size=_sapo_gradient_size),
        "vespo": Loss("generation", gradient_size=_vespo_gradient_size, is_of_sequences=True),
    }
)
"""The losses by `loss_type`. To support another loss, add an entry."""

CLIPPED_LOSS_TYPES = tuple(name for name, loss in LOSSES.items() if loss.has_clip_bounds)
