"""Samples leave the generation with what off-policy training must know of the policy that sampled them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate import Accelerator

from ..vllm_server.mismatch import DifferenceCheck, compare_with_sampler


class BehaviorPolicy:
    """
    Stamps the generations of a run with the policy that sampled them, and compares separate samplers with the trainer.

    Args:
        settings ([`~bapo_config.BAPOConfig`]): Of the run.
        score (`Callable`): Returns the log-probabilities of a batch, `(B, T)`, under the current policy.
        log (`Callable`): Takes metrics by name.
    """

    def __init__(
        self,
        settings: Any,
        accelerator: Accelerator,
        score: Callable[[dict[str, torch.Tensor]], torch.Tensor],
        log: Callable[[Mapping[str, float]], None],
    ):
        self._settings, self._accelerator, self._score, self._log = settings, accelerator, score, log
        self._check_difference = DifferenceCheck(
            settings.vllm_logp_tolerance, settings.biased_settings, warns=accelerator.is_main_process
        )

    def stamp(self, batch: dict[str, torch.Tensor], version: int, reports_logps: bool) -> bool:
        """
        Add what the batch lacks of policy versions, and of log-probabilities where they will be needed.

        Args:
            batch (`dict`): TRL's batch; with a `policy_version` already, if not all of it was sampled now.
            reports_logps (`bool`): Whether `sampling_per_token_logps`, if they are there, are those of the sampler.

        Returns:
            Whether the current policy sampled it all.

        Raises:
            RuntimeError: If the log-probabilities of sampler and trainer differ by more than the tolerance.
        """
        is_sampled_now = "policy_version" not in batch
        if is_sampled_now:
            # On the CPU: the staleness of rows is counted on the host, without waiting for the device.
            batch["policy_version"] = torch.full((len(batch["prompt_ids"]),), version)
        compares = reports_logps and "sampling_per_token_logps" in batch
        scored = batch
        if "old_per_token_logps" not in batch and (self._settings.uses_replay or compares):
            # TRL leaves them out where it sees an on-policy run, and takes all ratios to be 1
            scored = {**batch, "old_per_token_logps": self._score(batch)}
            if self._settings.uses_replay:
                batch["old_per_token_logps"] = scored["old_per_token_logps"]
        if compares:
            is_per_sequence = self._settings.vllm_importance_sampling_mode.startswith("sequence")
            metrics, difference = compare_with_sampler(scored, is_per_sequence, self._accelerator.gather)
            self._log(metrics)
            self._check_difference(difference)
        return is_sampled_now
