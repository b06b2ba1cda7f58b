"""Samples of vLLM: the client that suits the device, and how far its log-probabilities are from the trainer's.

The log-probabilities differ a little by arithmetic. They differ a lot when vLLM samples from other weights than the
trainer's, which nothing else would tell: training goes on, on wrong ratios.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from trl.generation import vllm_generation

from ..batch.sampler import SamplerLogps
from ..clip_bounds.grid import sum_dtype
from ..clip_bounds.reduce import DistributedSums
from ..errors import MissingPackageError
from ..upstream.trl_compat import HAS_OPENAI_CLIENT


MISMATCH_METRICS = (
    "sampling/raw_importance_sampling_ratio/mean", "sampling/raw_importance_sampling_ratio/min",
    "sampling/raw_importance_sampling_ratio/max", "sampling/truncated_share", "sampling/masked_share",
)  # fmt: skip
"""Metrics of each generation with the log-probabilities of a sampler, defined in docs/metrics.md."""


@contextmanager
def client_for(device: torch.device, request_timeout_s: float) -> Iterator[None]:
    """Have TRL talk to a vLLM server with limits, and as suits the device: on a CPU, the weights go over gloo."""
    client_class: Any
    if device.type == "cpu":
        try:
            from bapo_trl_gloo.client import GlooVLLMClient as client_class
        except ModuleNotFoundError as error:
            raise MissingPackageError(
                f"`use_vllm` is set, but {error.name} is not installed: on a CPU, `pip install ./plugins/vllm_gloo` "
                "in a checkout of bapo-trl."
            ) from error
    elif find_spec("vllm") is None:  # TRL would say so when it has loaded the model
        raise MissingPackageError("`use_vllm` is set, but vllm is not installed: pip install 'bapo-trl[vllm]'.")
    elif HAS_OPENAI_CLIENT:
        from .client import ServerClient as client_class  # needs requests, which only a server does
    else:
        client_class = vllm_generation.VLLMClient

    original = vllm_generation.VLLMClient
    limited: Any = type(client_class.__name__, (client_class,), {"request_timeout_s": request_timeout_s})
    vllm_generation.VLLMClient = limited
    try:
        yield
    finally:
        vllm_generation.VLLMClient = original


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
    sums = DistributedSums(
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
    total = sums.over_ranks(gather, raw.device, raw.dtype).numbers()
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
