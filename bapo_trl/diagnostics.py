"""What is logged at every optimizer update: names, definitions, and the one reduction that all of them share.

A rank sums up each micro-batch in a vector (`measure_tokens`). Vectors add up over micro-batches and over ranks with
`merge`, so one gather of a few numbers at the end of an update serves every metric, and one transfer to the host reads
them. Legend: `B` rows, `T` completion tokens.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from .bound_grid import sum_dtype
from .clip_bounds import ClipBounds
from .policy_tokens import PolicyTokens


UPDATE_METRICS = {
    "bapo/clip_low": "Lower clip bound of the update, in ratio space.",
    "bapo/clip_high": "Upper clip bound of the update, in ratio space.",
    "bapo/positive_share": "Share of the policy loss that positive-advantage tokens contribute under these bounds.",
    "bapo/positive_share_initial": "The same share under the start bounds.",
    "bapo/target_met": "1 if the share reached `positive_contribution_target`, else 0.",
    "bapo/search_steps": "Number of times a bound moved in the search.",
    "ratio/mean": "Mean importance ratio r over the tokens of the update (sequences, for sequence-level ratios).",
    "ratio/min": "Smallest importance ratio.",
    "ratio/max": "Largest importance ratio.",
    "ratio/ess": "Effective sample size over the number of ratios, (sum r)^2 / (N sum r^2), in (0, 1].",
    "ratio/kl": "k3 estimate of KL(behaviour policy || policy): mean of r - 1 - log r.",
    "ratio/chi2": "Chi-square divergence of the policy from the behaviour policy: mean of r^2 - 1.",
    "staleness/mean": "Mean age of the trained rows, in policy versions (optimizer updates since they were sampled).",
    "staleness/max": "Largest age of the trained rows, in policy versions.",
}
"""Definition of each logged metric."""

GUARDED_TENSORS = ("per_token_logps", "old_per_token_logps", "ref_per_token_logps", "advantages", "importance_ratio")
"""Tensors in which a NaN or an infinity stops the training."""

_SUMS = ("ratios", "ratio", "ratio_squared", "k3", "rows", "age", *GUARDED_TENSORS)
_MAXIMA = ("ratio_max", "negative_ratio_min", "age_max")


def measure_tokens(
    tokens: PolicyTokens,
    ages: torch.Tensor,
    guarded: Mapping[str, torch.Tensor | None],
    completion_mask: torch.Tensor,
) -> torch.Tensor:
    """
    Sum up one micro-batch.

    Args:
        tokens ([`PolicyTokens`]):
            Ratios, advantages and mask of the micro-batch.
        ages (`torch.Tensor`):
            Age of each row in policy versions, shape `(B,)`, integer. Rows without a token of the loss do not count.
        guarded (mapping of `str` to `torch.Tensor`):
            Log-probabilities by name, shape `(B, T)`; their NaNs and infinities on completion tokens are counted.
            `None` for a tensor that the batch does not have.
        completion_mask (`torch.Tensor`):
            1 for completion tokens, those that a tool wrote included, shape `(B, T)`. The loss multiplies tool tokens
            by 0, which does not stop a NaN.

    Returns:
        `torch.Tensor` of shape `(14,)`: sums, then maxima, to be combined with [`merge`].
    """
    device = tokens.ratio.device
    dtype = sum_dtype(device)
    valid = tokens.ratio_mask
    ratio = torch.where(valid, tokens.ratio, 0.0).to(dtype)
    log_ratio = torch.where(valid, tokens.log_ratio, 0.0).to(dtype)
    is_trained = tokens.mask.any(dim=1)
    ages = torch.where(is_trained, ages.to(device, dtype, non_blocking=True), 0.0)

    mask = completion_mask.bool()
    advantages = tokens.advantages if tokens.advantages.dim() == 2 else tokens.advantages.unsqueeze(1)
    suspects = {**guarded, "advantages": advantages.expand(mask.shape)}
    nonfinite = [
        (~suspects[name].isfinite() & mask).sum() if suspects.get(name) is not None else mask.new_zeros(())
        for name in GUARDED_TENSORS[:-1]
    ]
    nonfinite.append((~tokens.ratio.isfinite() & valid).sum())

    count = valid.sum()
    k3 = torch.where(valid, ratio - 1 - log_ratio, 0.0).sum()
    sums = [count, ratio.sum(), ratio.square().sum(), k3, is_trained.sum(), ages.sum()]
    maxima = [
        torch.where(valid, tokens.ratio, -math.inf).amax(),
        torch.where(valid, -tokens.ratio, -math.inf).amax(),
        ages.amax(),
    ]
    return torch.stack([value.to(dtype) for value in (*sums, *nonfinite, *maxima)])


def merge(vectors: torch.Tensor) -> torch.Tensor:
    """Combine the vectors of several micro-batches or ranks, shape `(N, 14)`, into one of shape `(14,)`."""
    return torch.cat([vectors[:, : len(_SUMS)].sum(0), vectors[:, len(_SUMS) :].amax(0)])


def bounds_vector(searches: Sequence[ClipBounds]) -> torch.Tensor:
    """
    Average the outcomes of an update's searches (one, or one for each micro-batch) for the log.

    Returns:
        `torch.Tensor` of shape `(6,)`, in the order of the `bapo/` metrics. An undefined share is left out of its
        mean, and is NaN where all are undefined.
    """
    fields = ("low", "high", "positive_share", "initial_positive_share", "target_met", "steps")
    dtype = searches[0].low.dtype
    rows = [torch.stack([getattr(bounds, field).to(dtype) for field in fields]) for bounds in searches]
    return torch.stack(rows).nanmean(dim=0)


def update_metrics(bounds: Sequence[float], tokens: Sequence[float]) -> dict[str, float]:
    """
    Compute the metrics of one optimizer update.

    Args:
        bounds (sequence of `float`):
            Values of [`bounds_vector`].
        tokens (sequence of `float`):
            Values of the merged vector of all micro-batches on all ranks.

    Returns:
        `dict` with the names of [`UPDATE_METRICS`]; NaN where a value is undefined (no token contributes, or
        none is there).
    """
    total = dict(zip((*_SUMS, *_MAXIMA), tokens, strict=True))
    count = total["ratios"]
    values = (
        *bounds,
        _ratio(total["ratio"], count),
        -total["negative_ratio_min"] if count else math.nan,
        total["ratio_max"] if count else math.nan,
        _ratio(total["ratio"] ** 2, count * total["ratio_squared"]),
        _ratio(total["k3"], count),
        _ratio(total["ratio_squared"], count) - 1,
        _ratio(total["age"], total["rows"]),
        total["age_max"],
    )
    return dict(zip(UPDATE_METRICS, values, strict=True))


class UpdateLog:
    """
    Collects what is logged of one optimizer update, from its first micro-batch to its last.

    Holds tensors only until `close`, which reduces them over ranks, reads them once, and starts afresh.
    """

    def __init__(self):
        self.searches: list[ClipBounds] = []
        self._measurements: list[torch.Tensor] = []

    @property
    def is_open(self) -> bool:
        """Whether a micro-batch of the current update has been added."""
        return bool(self._measurements)

    def add(self, measurement: torch.Tensor):
        """Add a micro-batch, as summed up by [`measure_tokens`]."""
        self._measurements.append(measurement)

    def close(self, gather: Callable[[torch.Tensor], torch.Tensor], update: int) -> dict[str, float]:
        """
        Return the metrics of the update, see [`UPDATE_METRICS`].

        Args:
            gather (`Callable`):
                Concatenates a tensor of all ranks along the first dimension.
            update (`int`):
                Number of the update, for the error message.

        Raises:
            RuntimeError: If a log-probability, an advantage or an importance ratio of a trained token is NaN or
                infinite, on any rank.
        """
        tokens = merge(gather(merge(torch.stack(self._measurements)).unsqueeze(0)))
        bounds = bounds_vector(self.searches)
        values = torch.cat([bounds, tokens]).tolist()
        self.searches, self._measurements = [], []

        tokens = values[len(bounds) :]
        counts = dict(zip(_SUMS, tokens, strict=False))
        broken = [f"`{name}` ({counts[name]:.0f} values)" for name in GUARDED_TENSORS if counts[name]]
        if broken:
            raise RuntimeError(
                f"NaN or infinity in {', '.join(broken)} at update {update}, before its optimizer step: nothing of "
                "this update was applied. Look for a learning rate that is too high, a reward that is not finite or "
                "half precision without loss scaling, and resume from a checkpoint."
            )
        return update_metrics(values[: len(bounds)], tokens)


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan
