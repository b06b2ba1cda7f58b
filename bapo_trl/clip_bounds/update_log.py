"""The metrics of each optimizer update: names, definitions, and the one reduction over ranks that they share.

Sums over micro-batches and ranks add up, so one gather of a few numbers at the end of an update serves every metric,
and one transfer to the host reads them. Legend: `B` samples, `T` completion tokens.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from .grid import sum_dtype
from .reduce import DistributedSums
from .search import ClipBounds
from .tokens import PolicyTokens


_SEARCH_FIELDS = {
    "bapo/clip_low": "low", "bapo/clip_high": "high", "bapo/positive_share": "positive_share",
    "bapo/positive_share_initial": "initial_positive_share", "bapo/target_met": "target_met",
    "bapo/search_steps": "steps", "bapo/negative_weight": "negative_weight",
}  # fmt: skip

UPDATE_METRICS = (
    *_SEARCH_FIELDS, "bapo/entropy_covariance", "ratio/mean", "ratio/min", "ratio/max", "ratio/ess", "ratio/kl",
    "ratio/chi2", "staleness/mean", "staleness/max",
)  # fmt: skip
"""Metrics of each update, defined in docs/metrics.md."""

GUARDED_TENSORS = ("per_token_logps", "old_per_token_logps", "ref_per_token_logps", "advantages", "importance_ratio")
"""Tensors in which a NaN or an infinity stops the training."""


def measure_tokens(
    tokens: PolicyTokens, staleness: torch.Tensor | None, bounds: ClipBounds, delta: float | None = None
) -> DistributedSums:
    """
    Sum the numbers that the metrics are computed from over one micro-batch.

    `staleness` is given per sample, `(B,)`, or per token, `(B, T)`, in policy versions; `None` if it is unknown.
    Only tokens of the loss, and samples with such a token, are counted, also for NaNs and infinities in `log_probs`.
    `delta` is TRL's two-sided clip.
    """
    device, dtype = tokens.ratio.device, sum_dtype(tokens.ratio.device)
    mask, valid, advantages = tokens.mask.bool(), tokens.ratio_mask, tokens.column_advantages
    # Shared by all calls: each number given to `torch.where` would launch another kernel
    zero = torch.zeros((), device=device)
    infinity = torch.full_like(zero, math.inf)
    ratio = torch.where(valid, tokens.ratio, zero).to(dtype)
    log_ratio = torch.where(valid, tokens.log_ratio, zero).to(dtype)
    is_trained = mask.any(dim=1)
    counted = mask if staleness is not None and staleness.dim() == 2 else is_trained
    if staleness is None:
        staleness = torch.full_like(zero, math.nan)
    staleness = torch.where(counted, staleness.to(device, dtype), zero)

    nonfinite = dict.fromkeys(GUARDED_TENSORS, zero)
    nonfinite |= _count_nonfinite({**tokens.log_probs, "advantages": advantages.expand(mask.shape)}, mask)
    nonfinite |= _count_nonfinite({"importance_ratio": tokens.ratio}, valid)

    passes = tokens.passes(bounds.low, bounds.high, delta)
    weighed = tokens.balanced_advantages(bounds.negative_weight).reshape(advantages.shape)
    if tokens.gradient_size is not None:
        weighed = weighed * tokens.gradient_size
    passing_logps = torch.where(passes, tokens.log_probs["per_token_logps"], zero).to(dtype)
    passing_advantages = torch.where(passes, weighed, zero).to(dtype)
    return DistributedSums(
        {
            "ratios": valid.sum(),
            "ratio": ratio.sum(),
            "ratio_squared": ratio.square().sum(),
            "k3": torch.where(valid, ratio - 1 - log_ratio, zero).sum(),
            "versions": counted.sum(),
            "staleness": staleness.sum(),
            "passing": passes.sum(),
            "passing_logp": passing_logps.sum(),
            "passing_advantage": passing_advantages.sum(),
            "passing_product": (passing_logps * passing_advantages).sum(),
            **nonfinite,
        },
        {
            "ratio_max": torch.where(valid, tokens.ratio, -infinity).amax(),
            "negative_ratio_min": -torch.where(valid, tokens.ratio, infinity).amin(),
            "staleness_max": staleness.amax(),
        },
    )


def _count_nonfinite(tensors: Mapping[str, torch.Tensor], mask: torch.Tensor) -> dict[str, torch.Tensor]:
    products = torch.stack(list(tensors.values())) * 0  # NaN for them, and 0 for any other number
    counts = (products.isnan() & mask).sum(dim=(1, 2))
    return dict(zip(tensors, counts.unbind(), strict=True))


def average_searches(searches: Sequence[ClipBounds]) -> dict[str, torch.Tensor]:
    """
    Average the results of an update's searches (one, or one for each micro-batch) for the log.

    Searches without a contributing token are skipped. If there is no other search, the bounds are the ones it kept,
    and the shares and `target_met` are NaN.
    """
    dtype = searches[0].low.dtype
    finds_tokens = torch.stack([~bounds.initial_positive_share.isnan() for bounds in searches])
    values = {
        name: torch.stack([getattr(bounds, field).to(dtype) for bounds in searches])
        for name, field in _SEARCH_FIELDS.items()
    }
    means = {name: each.where(finds_tokens, math.nan).nanmean() for name, each in values.items()}
    kept = ("bapo/clip_low", "bapo/clip_high", "bapo/search_steps", "bapo/negative_weight")
    return means | {name: means[name].where(finds_tokens.any(), values[name].mean()) for name in kept}


def token_metrics(total: Mapping[str, float]) -> dict[str, float]:
    """Return the token metrics from the numbers of [`measure_tokens`], summed over ranks; NaN where undefined."""
    count, passing = total["ratios"], total["passing"]
    return {
        "bapo/entropy_covariance": _ratio(total["passing_product"], passing)
        - _ratio(total["passing_logp"], passing) * _ratio(total["passing_advantage"], passing),
        "ratio/mean": _ratio(total["ratio"], count),
        "ratio/min": -total["negative_ratio_min"] if count else math.nan,
        "ratio/max": total["ratio_max"] if count else math.nan,
        "ratio/ess": _ratio(total["ratio"] ** 2, count * total["ratio_squared"]),
        "ratio/kl": _ratio(total["k3"], count),
        "ratio/chi2": _ratio(total["ratio_squared"], count) - 1,
        "staleness/mean": _ratio(total["staleness"], total["versions"]),
        "staleness/max": total["staleness_max"] if total["versions"] else math.nan,
    }


def unlogged_metrics(settings: Any) -> set[str]:
    """Return the metrics that carry no information under the settings of a run, a [`~bapo_config.BAPOConfig`]."""
    names = set()
    if not settings.has_clip_bounds:
        names |= {"bapo/clip_low", "bapo/clip_high"}
    if settings.bound_grid.is_fixed:
        names.add("bapo/search_steps")
    if not settings.is_adaptive:
        names.add("bapo/target_met")
        if not settings.has_constant_weight:  # the share is always the initial one
            names.add("bapo/positive_share_initial")
    return names


def update_metrics(
    searches: Sequence[ClipBounds],
    sums: DistributedSums,
    gather: Callable[[torch.Tensor], torch.Tensor],
    update: int,
    unlogged: Collection[str] = (),
) -> dict[str, float]:
    """
    Return the metrics of an update, without some, from its searches and the sums over the tokens of this rank.

    Undefined metrics are NaN. A NaN or an infinity in one of [`GUARDED_TENSORS`], on any rank, raises a `RuntimeError`
    with the number of the update.
    """
    bounds, device = average_searches(searches), searches[0].low.device
    total = sums.over_ranks(gather, device, sum_dtype(device))
    numbers = DistributedSums({**bounds, **total.sums}, total.maxima).numbers()
    broken = [f"`{name}` ({numbers[name]:.0f} values)" for name in GUARDED_TENSORS if numbers[name]]
    if broken:
        raise RuntimeError(
            f"NaN or infinity in {', '.join(broken)} at update {update}, before its optimizer step: this update "
            "was not applied. Check for a learning rate that is too high, a reward that is not finite or half "
            "precision without loss scaling, then resume from a checkpoint. To change the learning rate, start a "
            "new run with the checkpoint's folder as the model."
        )
    return {name: numbers[name] for name in bounds if name not in unlogged} | token_metrics(numbers)


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan
