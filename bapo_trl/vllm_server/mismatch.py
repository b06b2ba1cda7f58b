"""Compare vLLM's log-probabilities with the trainer's, and choose vLLM's client for the device.

The log-probabilities differ slightly because of different arithmetic. A large difference means that vLLM does not
sample from the trainer's weights. Without this check, training would continue with wrong importance ratios.
"""

import importlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from trl.generation import vllm_generation

from ..batch.sampler import SamplerLogps
from ..clip_bounds.grid import sum_dtype
from ..clip_bounds.reduce import DistributedSums
from ..errors import MissingPackageError
from ..upstream.fixes import restoring
from .quantized import unquantized_engine


MISMATCH_METRICS = (
    "sampling/raw_importance_sampling_ratio/mean", "sampling/raw_importance_sampling_ratio/min",
    "sampling/raw_importance_sampling_ratio/max", "sampling/truncated_share", "sampling/masked_share",
)  # fmt: skip
"""Metrics of each generation with the log-probabilities of a sampler, defined in docs/metrics.md."""


def sampler_for(args: Any) -> AbstractContextManager:
    """Return a context in which TRL creates the sampler of a [`~bapo_config.BAPOConfig`]: its client or engine."""
    if not args.use_vllm:
        return nullcontext()
    if args.vllm_mode == "server":
        return client_for(args.device, args.vllm_request_timeout)
    return unquantized_engine()


def trl_sampler_for(args: Any) -> AbstractContextManager:
    """Return a context in which TRL's own trainer creates its sampler; on a CPU, its weights are sent over gloo."""
    if not (args.use_vllm and args.vllm_mode == "server" and args.device.type == "cpu"):
        return nullcontext()
    return _with_client(_gloo_client("GlooClient"), args.vllm_request_timeout)


def client_for(device: torch.device, request_timeout_s: float) -> AbstractContextManager:
    """Have TRL create a client with time limits that suits the device: on a CPU, it sends the weights over gloo."""
    client_class: Any
    if device.type == "cpu":
        client_class = _gloo_client("GlooVLLMClient")
    elif find_spec("vllm") is None:  # TRL would raise an error only after loading the model
        raise MissingPackageError("`use_vllm` is set, but vllm is not installed: pip install 'bapo-trl[vllm]'.")
    else:
        from .client import ServerClient as client_class  # needs requests, as only a server does

    return _with_client(client_class, request_timeout_s)


def _gloo_client(name: str) -> Any:
    try:
        return getattr(importlib.import_module("bapo_trl_gloo.client"), name)
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"`use_vllm` is set, but {error.name} is not installed: on a CPU, `pip install ./plugins/vllm_gloo` "
            "in a checkout of bapo-trl."
        ) from error


@contextmanager
def _with_client(client_class: Any, request_timeout_s: float) -> Iterator[None]:
    limited: Any = type(client_class.__name__, (client_class,), {"request_timeout_s": request_timeout_s})
    with restoring([vllm_generation], "VLLMClient"):
        vllm_generation.VLLMClient = limited
        yield


def compare_with_sampler(
    logps: SamplerLogps, is_per_sequence: bool, gather: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[dict[str, float], float]:
    """
    Compare the log-probabilities of trainer and sampler on the latest samples of all ranks.

    Only the tokens of each sample's latest segment count. TRL's correction is per sequence if `is_per_sequence`.

    Returns the values of [`MISMATCH_METRICS`] (NaN without a token), and the mean absolute difference in nats per
    token (0 if the policy wrote no token, NaN if the sampler gave no log-probabilities).
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
    # TRL's correction is per sequence or per token
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
    """Stop training if log-probabilities differ too much between sampler and trainer."""

    tolerance: float | None  # largest mean absolute difference in nats per token; `None` for no check
    biased_settings: Sequence[str] = ()  # settings that sample from another distribution than the trainer's
    warns: bool = True  # warn once if such a setting may explain a large difference, which hides wrong weights
    is_quantized: bool = False  # a trainer in 4 or 8 bits, whose forward passes round more: twice the tolerance

    def __call__(self, mean_difference: float) -> None:
        """Raise a `RuntimeError` if the difference is NaN, or above the tolerance without a setting to explain it."""
        if self.tolerance is None or mean_difference <= self.tolerance * (1 + self.is_quantized):
            return
        finding = (
            f"The log-probabilities of vLLM and of the trainer differ by {mean_difference:.3g} nats per token on "
            f"average on the latest samples; `vllm_logp_tolerance` is {self.tolerance:g}"
            f"{', doubled for a quantized model' if self.is_quantized else ''}. "
        )
        if not self.biased_settings or math.isnan(mean_difference):
            raise RuntimeError(
                f"{finding}Either the server's weights are not the trainer's (another model, or a failed weight "
                "transfer), or it does not report the log-probabilities that it samples with: start it with "
                "`bapo-trl serve --model MODEL` or with `--logprobs-mode processed_logprobs`; a `rollout_func` must "
                "return vLLM's log-probabilities. If the difference comes from low precision, raise the tolerance."
            )
        if self.warns:
            warnings.warn(
                f"{finding}The samples are drawn with {', '.join(self.biased_settings)}, which the trainer's "
                "log-probabilities do not include. So a difference is expected, and this check cannot detect wrong "
                "weights of the server. This warning is shown once.",
                stacklevel=2,
            )
            self.warns = False
