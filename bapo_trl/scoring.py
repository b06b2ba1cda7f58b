"""What a `GRPOTrainer` can tell of a batch besides its loss: log-probabilities, and how the loss weighs each token."""

from collections.abc import Mapping

import torch

from .forward_passes import without_gradient_checkpointing
from .policy_tokens import PolicyTokens, policy_mask, policy_tokens
from .trl_compat import FORWARD_KEYS


class Scoring:
    """
    Scores batches under the current policy. To be put before [`~trl.GRPOTrainer`] among the bases of a trainer.

    Legend: `B` rows, `T` completion tokens.
    """

    def _reset_run_state(self):
        """Forget what belongs to a run. The bases add their own."""
        self._step, self._buffered_inputs = 0, None  # TRL's

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

    def _log_values(self, values: Mapping[str, float], mode: str = "train") -> None:
        """Add values by name to what TRL averages and logs next."""
        for name, value in values.items():
            self._metrics[mode][name].append(value)
