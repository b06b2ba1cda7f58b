"""What a `GRPOTrainer` can tell of a batch besides its loss: log-probabilities, and how the loss weighs each token."""

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace

import torch

from .clip_bounds import Contributions, size_contributions
from .clip_bounds.loss_kernels import cispo_gradient_size, sapo_gradient_size
from .clip_bounds.tokens import PolicyTokens, policy_mask, policy_tokens
from .trainer_mixin import TrainerMixin
from .upstream.forward_passes import (
    forked_random_state,
    has_random_forward,
    in_eval_mode,
    without_gradient_checkpointing,
)
from .upstream.trl_compat import FORWARD_KEYS


class Scoring(TrainerMixin):
    """
    Scores batches under the current policy. To be put before [`~trl.GRPOTrainer`] among the bases of a trainer.

    Legend: `B` rows, `T` completion tokens.
    """

    def _reset_run_state(self):
        """Forget what belongs to a run. The bases add their own."""
        # TRL's, which makes them with the trainer, and not for each run
        self._step, self._buffered_inputs = 0, None
        self.entropy_coef, self._last_world_entropy, self._entropy_window_stats = (
            self.args.entropy_coef,
            math.inf,
            None,
        )
        for left in (*self._metrics.values(), self._pending_metrics, self._pending_extra_logs):
            left.clear()
        self._has_probed_padding = False
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

    def _warn_if_padding_counts(self):
        """Warn of a model whose log-probabilities of a row change with the padding before it."""
        self._has_probed_padding = True
        ids = (torch.arange(17, device=self.accelerator.device) % len(self._tokenizer)).unsqueeze(0)
        padding = torch.full_like(ids[:, :8], self._tokenizer.pad_token_id)
        ones = torch.ones_like(ids)
        row = {"prompt_ids": ids[:, :1], "prompt_mask": ones[:, :1]}
        row |= {"completion_ids": ids[:, 1:], "completion_mask": ones[:, 1:]}
        padded = row | {
            "prompt_ids": torch.cat([padding, row["prompt_ids"]], dim=1),
            "prompt_mask": torch.cat([torch.zeros_like(padding), row["prompt_mask"]], dim=1),
        }
        with in_eval_mode(self.model):  # without dropout
            (alone, _), (beside, _) = self._score(row), self._score(padded)
        is_float32 = self.model.dtype == torch.float32 and self.accelerator.mixed_precision == "no"
        rounding = 0.01 if is_float32 else 0.1  # nats a token; half precision rounds logits to about a tenth
        if (alone - beside).abs().mean() > rounding and self.accelerator.is_main_process:
            warnings.warn(
                f"The model ({self.model.config.model_type}) does not take positions from the attention mask: the "
                "log-probabilities of a sample change with the padding before it. Samples of a replay queue and of "
                "partial rollouts are trained with other padding than they were scored with, so that their "
                "importance ratios are wrong. Take a model with relative positions, or prompts of equal length."
            )

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
        tokens = self._weighed_tokens(inputs, per_token_logps, old_per_token_logps, factors)
        return replace(tokens, gradient_size=self._gradient_size(inputs, tokens))

    def _weighed_tokens(self, inputs, per_token_logps, old_per_token_logps, factors) -> PolicyTokens:
        # VESPO takes the correction into its own weight of a sequence
        if self.use_vllm and self.vllm_importance_sampling_correction and self.loss_type != "vespo":
            factors = [*factors, inputs["importance_sampling_ratio"]]
        return policy_tokens(
            per_token_logps,
            old_per_token_logps,
            inputs["advantages"],
            policy_mask(inputs),
            loss_type=self.loss_type,
            # VESPO makes sequence ratios of its own from those of the tokens
            importance_sampling_level="token" if self.loss_type == "vespo" else self.importance_sampling_level,
            weighting=self.args.contribution_weighting,
            factors=factors,
        )

    def _gradient_size(self, inputs, tokens: PolicyTokens) -> torch.Tensor | None:
        """Return the size of each token's gradient under a loss without clip bounds, else `None`."""
        advantages = tokens.column_advantages
        if self.loss_type == "cispo":
            return cispo_gradient_size(tokens.ratio, self.epsilon_high)
        if self.loss_type == "sapo":
            return sapo_gradient_size(
                tokens.ratio, advantages, self.args.sapo_temperature_pos, self.args.sapo_temperature_neg
            )
        if self.loss_type == "vespo":
            names = ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
            return self.get_gamma_weights(
                advantages=advantages,
                log_ratio_per_token=tokens.log_ratio,
                mask=tokens.mask,
                importance_sampling_ratio=inputs.get("importance_sampling_ratio"),
                **{name: getattr(self.args, f"vespo_{name}") for name in names},
            )
        return None

    def _masses(self, inputs) -> Contributions:
        """Return the sum of w |A| of each sign, of a micro-batch, without what only a forward pass can tell."""
        logps = _any_logps(inputs)
        tokens = self._weighed_tokens(inputs, logps, inputs.get("old_per_token_logps", logps), ())
        return size_contributions(torch.ones_like(tokens.ratio), tokens.advantages, tokens.weights)

    @property
    def _window(self) -> list[int]:
        """Positions in the buffer of the micro-batches of the coming update."""
        count = self.current_gradient_accumulation_steps
        return [(self._step + i) % self.args.steps_per_generation for i in range(count)]

    def _needs_forward_ahead(self, are_fresh: bool) -> bool:
        """
        Return whether only a forward pass can tell what the losses of the coming update will see.

        Args:
            are_fresh (`bool`):
                Whether the current policy sampled all rows: their ratios are 1 then, unless a forward pass is random.
        """
        batch = self._buffered_inputs[self._window[0]]
        # The mask compares them with the sampler's
        masks = self.off_policy_mask_threshold is not None and "sampling_per_token_logps" in batch
        reads_logps = masks or self.args.contribution_weighting == "behavior_prob"
        return (
            not are_fresh
            or self._has_random_forward
            or self.top_entropy_quantile < 1
            or (reads_logps and "old_per_token_logps" not in batch)
        )

    @torch.no_grad()
    def _tokens_ahead(self, are_fresh: bool) -> list[PolicyTokens]:
        """Return the tokens of the micro-batches of the coming update, as their losses will see them."""
        window = [self._buffered_inputs[position] for position in self._window]
        if not self._needs_forward_ahead(are_fresh):
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
