"""How far the log-probabilities of a sampler are from the trainer's.

They differ a little by arithmetic. They differ a lot when vLLM samples from other weights than the trainer's, which
nothing else would tell: training goes on, on wrong ratios.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..batch.sampler import SamplerLogps
from ..clip_bounds.grid import sum_dtype
from ..clip_bounds.reduce import DistributedSums


MISMATCH_METRICS = (
    "sampling/raw_importance_sampling_ratio/mean", "sampling/raw_importance_sampling_ratio/min",
    "sampling/raw_importance_sampling_ratio/max", "sampling/truncated_share", "sampling/masked_share",
)  # fmt: skip
"""Metrics of each generation with the log-probabilities of a sampler, defined in docs/metrics.md."""


def compare_with_sampler(
    logps: SamplerLogps, is_per_sequence: bool, gather: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[dict[str, float], float]:
    """
    Compare the log-probabilities of trainer and sampler on the samples just drawn, on all ranks.

    The tokens of each sample's latest segment count. TRL's correction is of sequences if `is_per_sequence`.

    Returns the values of [`MISMATCH_METRICS`] (NaN without a token), and the mean absolute difference in nats a token
    (0 without a token of the policy, NaN if the sampler gave no log-probability of any).
    """
    dtype = sum_dtype(logps.mask.device)
    is_known = ~logps.sampler.isnan()
    mask, latest = logps.mask & is_known, logps.latest & is_known
    difference = torch.where(mask, logps.trainer - logps.sampler, 0.0).to(dtype)
    of_latest = torch.where(latest, difference, 0.0)
    log_raw, log_whole, counts = of_latest, difference, latest
    if is_per_sequence:
        log_raw, log_whole = (each.sum(dim=1, keepdim=True) for each in (log_raw, log_whole))
        counts = latest.any(dim=1, keepdim=True)
    raw, whole = log_raw.exp(), log_whole.exp()
    # TRL's is of the whole sequence, or of tokens
    used = whole if logps.correction is None else logps.correction.to(raw)
    is_masked = (used == 0) & counts
    is_truncated = ~torch.isclose(used, whole, rtol=1e-5, atol=0) & counts & ~is_masked
    tally = DistributedSums(
        {
            "policy_tokens": logps.mask.sum(),
            "tokens": latest.sum(),
            "difference": of_latest.abs().sum(),
            "ratios": counts.sum(),
            "ratio": torch.where(counts, raw, 0.0).sum(),
            "truncated": is_truncated.sum(),
            "masked": is_masked.sum(),
        },
        {
            "largest": torch.where(counts, raw, -math.inf).amax(),
            "negative_smallest": torch.where(counts, -raw, -math.inf).amax(),
        },
    )
    total = tally.over_ranks(gather, raw.device, raw.dtype).numbers()
    if not total["ratios"]:
        return dict.fromkeys(MISMATCH_METRICS, math.nan), math.nan if total["policy_tokens"] else 0.0
    mean, truncated, masked = (total[name] / total["ratios"] for name in ("ratio", "truncated", "masked"))
    values = mean, -total["negative_smallest"], total["largest"], truncated, masked
    return dict(zip(MISMATCH_METRICS, values, strict=True)), total["difference"] / total["tokens"]


@dataclass
class DifferenceCheck:
    """Refuses samples whose log-probabilities differ too much between sampler and trainer."""

    tolerance: float | None  # largest mean absolute difference in nats a token; `None` for no check
    biased_settings: Sequence[str] = ()  # that draw from another distribution than the trainer's
    warns: bool = True  # of a large difference with any of these, which says nothing of the server's weights: once

    def __call__(self, mean_difference: float) -> None:
        """Raise a `RuntimeError` if no setting explains a difference above the tolerance, or if it is NaN."""
        if self.tolerance is None or mean_difference <= self.tolerance:
            return
        finding = (
            f"The log-probabilities of vLLM and of the trainer differ by {mean_difference:.3g} nats a token on the "
            f"samples just drawn, on average; `vllm_logp_tolerance` is {self.tolerance:g}. "
        )
        if not self.biased_settings or math.isnan(mean_difference):
            raise RuntimeError(
                f"{finding}Either the server's weights are not the trainer's (another model, a weight transfer that "
                "failed), or it reports other log-probabilities than those it samples from: start it with "
                "`bapo-trl serve --model MODEL` or with `--logprobs-mode processed_logprobs`; a `rollout_func` must "
                "hand on vLLM's. If the difference comes from low precision, raise the tolerance."
            )
        if self.warns:
            warnings.warn(
                f"{finding}The samples are drawn with {', '.join(self.biased_settings)}, which the trainer's "
                "log-probabilities leave out, so that this is no sign of a wrong server, and a wrong one would not "
                "show in it. Not said again.",
                stacklevel=2,
            )
            self.warns = False
