"""What a `GRPOTrainer` can tell of a batch besides its loss: log-probabilities, and how the loss weighs each token."""

from collections.abc import Mapping

import torch

from .forward_passes import forked_random_state, has_random_forward, without_gradient_checkpointing
from .policy_tokens import PolicyTokens, policy_mask, policy_tokens
from .trainer_mixin import TrainerMixin
from .trl_compat import FORWARD_KEYS


class Scoring(TrainerMixin):
    """
    Scores batches under the current policy. To be put before [`~trl.GRPOTrainer`] among the bases of a trainer.

    Legend: `B` rows, `T` completion tokens.
    """

    def _reset_run_state(self):
        """Forget what belongs to a run. The bases add their own."""
        self._step, self._buffered_inputs = 0, None  # TRL's
        self._has_random_forward = has_random_forward(self.model, self.args.neftune_noise_alpha)

    @torch.no_grad()
    def _score(self, inputs, compute_entropy=False, batch_size=None):
        """Return log-probabilities and entropies, `(B, T)` each, of a batch under the current policy."""
        with without_gradient_checkpointing(self.model):
            per_token_logps, entropies, *_ = self._get_per_token_logps_and_entropies(
                self.model,
                torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
                torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
                inputs["completion_ids"].size(1),
                batch_size=batch_size,
                compute_entropy=compute_entropy,
                **{key: inputs.get(key) for key in FORWARD_KEYS},
            )
        return per_token_logps, entropies

    def _policy_tokens(self, inputs, per_token_logps, entropies) -> PolicyTokens:
        """Read off TRL's batch the tokens of the policy loss, weighed as `_compute_loss` weighs them."""
        mask = policy_mask(inputs)
        advantages = inputs["advantages"]
        old_per_token_logps = inputs.get("old_per_token_logps", per_token_logps)  # absent: sampled by this policy
        factors = []
        if self.off_policy_mask_threshold is not None:
            off_policy_mask = self.get_off_policy_mask(
                advantages=advantages if advantages.dim() == 2 else advantages.unsqueeze(1),
                per_token_logps=per_token_logps,
                sampling_per_token_logps=inputs.get("sampling_per_token_logps", old_per_token_logps),
                mask=mask,
                off_policy_threshold=self.off_policy_mask_threshold,
            )
            factors.append(off_policy_mask)
        if self.top_entropy_quantile < 1:
            factors.append(self.get_high_entropy_mask(entropies, mask, 1 - self.top_entropy_quantile))
        if self.use_vllm and self.vllm_importance_sampling_correction:
            factors.append(inputs["importance_sampling_ratio"])
        return policy_tokens(
            per_token_logps,
            old_per_token_logps,
            advantages,
            mask,
            loss_type=self.loss_type,
            importance_sampling_level=self.importance_sampling_level,
            weighting=self.args.contribution_weighting,
            factors=factors,
        )

    @torch.no_grad()
    def _tokens_ahead(self, are_fresh: bool) -> list[PolicyTokens]:
        """
        Return the tokens of the micro-batches of the coming update, as their losses will see them.

        Args:
            are_fresh (`bool`):
                Whether the current policy sampled all rows: their ratios are 1 then, unless a forward pass is random.
        """
        first, count = self._step, self.current_gradient_accumulation_steps
        window = [self._buffered_inputs[(first + i) % self.args.steps_per_generation] for i in range(count)]
        needs_logps = self.top_entropy_quantile < 1 or (
            self.args.contribution_weighting == "behavior_prob" and "old_per_token_logps" not in window[0]
        )
        if are_fresh and not self._has_random_forward and not needs_logps:
            return [self._policy_tokens(inputs, _any_logps(inputs), None) for inputs in window]
        # The forward passes of the loss come in the same order: from the same random state they drop out the same.
        with forked_random_state(self.accelerator.device):
            return [
                self._policy_tokens(inputs, *self._score(inputs, self.top_entropy_quantile < 1)) for inputs in window
            ]

    def _log_values(self, values: Mapping[str, float], mode: str = "train") -> None:
        """Add values by name to what TRL averages and logs next."""
        for name, value in values.items():
            self._metrics[mode][name].append(value)


def _any_logps(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return log-probabilities of rows that the current policy sampled: only their difference to these counts."""
    logps = inputs.get("old_per_token_logps")
    return torch.zeros_like(inputs["completion_mask"], dtype=torch.float32) if logps is None else logps
