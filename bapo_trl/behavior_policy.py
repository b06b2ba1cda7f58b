"""Samples leave the generation with what off-policy training must know of the policy that sampled them."""

import torch

from .errors import InputError
from .upstream import trl_compat
from .upstream.forward_passes import without_gradient_checkpointing
from .vllm_server.mismatch import DifferenceCheck, compare_with_sampler
from .vllm_server.restart import ServerRestarts
from .vllm_server.stale_server import StaleServerCheck


class KnownBehaviorPolicy(ServerRestarts):
    """
    Adds to each batch that a [`~trl.GRPOTrainer`] generates the policy version that sampled it, and its
    log-probabilities where they will be needed; checks those of a separate sampler. To be put before the trainer, and
    before [`~server_restart.ServerRestarts`], among the bases.
    """

    def _reset_run_state(self):
        super()._reset_run_state()
        self._last_loaded_step = -1  # TRL's: vLLM gets the weights before the next generation
        # The version that sampled all rows of the buffer, on all ranks; `None` if they differ
        self._buffer_version: int | None = None
        self._check_difference = DifferenceCheck(
            self.args.vllm_logp_tolerance, self.args.biased_settings, warns=self.accelerator.is_main_process
        )
        self._check_server = self._make_server_check()

    def _make_server_check(self) -> StaleServerCheck | None:
        if not trl_compat.uses_vllm_server(self) or self._is_vlm or self.args.vllm_logp_tolerance is None:
            return None
        client = self.vllm_generation.vllm_client if self.accelerator.is_main_process else None
        return StaleServerCheck(self.model, self.accelerator, client)

    def _generate_and_score_completions(self, inputs):
        if self.environment_factories is None and "prompt" not in inputs[0]:
            raise InputError(f"A row of the dataset has no `prompt`, only {sorted(inputs[0])}: rename the column.")
        with without_gradient_checkpointing(self.model):
            output = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            return output
        self._buffer_version = None
        if "policy_version" not in output:  # the current policy sampled it all
            # On the CPU: the staleness of rows is counted on the host, without waiting for the device.
            output["policy_version"] = torch.full((len(output["prompt_ids"]),), self.state.global_step)
            self._buffer_version = self.state.global_step
        # Without vLLM, TRL does not read the log-probabilities of a `rollout_func`: they may be placeholders.
        are_of_sampler = self.use_vllm or self.rollout_func is None
        compares = are_of_sampler and "sampling_per_token_logps" in output
        needs_logps = self.args.uses_replay or compares
        if needs_logps and "old_per_token_logps" not in output:  # TRL leaves them out where it sees an on-policy run
            batch_size = self.args.per_device_train_batch_size
            output["old_per_token_logps"], _ = self._score(output, batch_size=batch_size)
        if compares:
            is_per_sequence = self.vllm_importance_sampling_mode.startswith("sequence")
            metrics, difference = compare_with_sampler(output, is_per_sequence, self.accelerator.gather)
            self._log_values(metrics)
            self._check_difference(difference)
        # A server that was started anew meanwhile has old weights for a good reason; the next generation sees to it
        if self._check_server is not None and self._has_same_server():
            self._log_values(self._check_server(output))
        return output
