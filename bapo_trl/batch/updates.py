"""Feeds TRL's micro-batches to the clip-bound controller, one optimizer update after the other."""

import operator
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import torch

from ..clip_bounds import ClipBounds, Contributions, size_contributions
from ..clip_bounds.controller import ClipBoundController
from ..clip_bounds.grid import SINGLE_POINT
from ..clip_bounds.tokens import PolicyTokens, policy_tokens
from ..upstream.forward_passes import has_random_forward
from .losses import LOSSES
from .micro_batches import MicroBatches
from .policy_loss import known_old_logps, mask_values, policy_mask, without_masked_values
from .samples import versions_of
from .scoring import score_ahead


class PolicyLoss:
    """Read the tokens of a trainer's policy loss, with the weights that TRL's `_compute_loss` gives them."""

    def __init__(self, trainer: Any):
        self._trainer, self._settings, self._loss = trainer, trainer.args, LOSSES[trainer.args.loss_type]
        self._is_random = has_random_forward(trainer.model, trainer.neftune_noise_alpha)

    @torch.no_grad()
    def tokens(
        self, inputs: Mapping[str, Any], per_token_logps: torch.Tensor, entropies: torch.Tensor | None
    ) -> PolicyTokens:
        """Return the tokens of a micro-batch from the current policy's log-probabilities and entropies, `(B, T)`."""
        settings, mask, advantages = self._settings, policy_mask(inputs), inputs["advantages"]
        old_per_token_logps = known_old_logps(inputs, per_token_logps)
        factors = []
        if settings.off_policy_mask_threshold is not None:
            factors.append(
                self._trainer.get_off_policy_mask(
                    advantages=advantages if advantages.dim() == 2 else advantages.unsqueeze(1),
                    per_token_logps=per_token_logps,
                    sampling_per_token_logps=inputs.get("sampling_per_token_logps", old_per_token_logps),
                    mask=mask,
                    off_policy_threshold=settings.off_policy_mask_threshold,
                )
            )
        if settings.top_entropy_quantile < 1:
            factors.append(self._trainer.get_high_entropy_mask(entropies, mask, 1 - settings.top_entropy_quantile))
        tokens = self._weighed(inputs, per_token_logps, old_per_token_logps, factors)
        log_probs = {name: inputs[name] for name in ("old_per_token_logps", "ref_per_token_logps") if name in inputs}
        tokens = replace(tokens, log_probs={**log_probs, "per_token_logps": per_token_logps})
        if self._loss.gradient_size is None:
            return tokens
        size = self._loss.gradient_size(tokens, settings, inputs.get("importance_sampling_ratio"))
        return replace(tokens, gradient_size=size)

    def know_ratios(self, micro_batches: Sequence[Mapping[str, Any]], are_fresh: bool) -> bool:
        """
        Return whether the tokens of the micro-batches of the coming update are known without a forward pass.

        The ratios of fresh samples are 1: by definition without old log-probabilities, else if forward passes are not
        random.
        """
        if not micro_batches:
            return True
        batch, settings = micro_batches[0], self._settings
        # The off-policy mask compares log-probabilities with the sampler's
        masks = settings.off_policy_mask_threshold is not None and "sampling_per_token_logps" in batch
        reads_logps = masks or settings.contribution_weighting == "behavior_prob"
        has_logps = "old_per_token_logps" in batch
        are_known = not self._is_random if has_logps else not reads_logps
        return are_fresh and are_known and settings.top_entropy_quantile == 1

    @torch.no_grad()
    def tokens_ahead(self, micro_batches: Sequence[Mapping[str, Any]], are_fresh: bool) -> list[PolicyTokens]:
        """
        Return the tokens of the micro-batches of the coming update as their losses will see them.

        This takes a forward pass, unless they are known without one. `are_fresh`: the current policy sampled all.
        """
        micro_batches = [without_masked_values(inputs) for inputs in micro_batches]
        if self.know_ratios(micro_batches, are_fresh):
            return [self.tokens(inputs, _any_logps(inputs), None) for inputs in micro_batches]
        scores = score_ahead(self._trainer, micro_batches, self._settings.top_entropy_quantile < 1)
        return [
            self.tokens(inputs, mask_values(inputs, logps), entropies)
            for inputs, (logps, entropies) in zip(micro_batches, scores, strict=True)
        ]

    def total_absolute_advantages(self, inputs: Mapping[str, Any]) -> Contributions:
        """Return the sum of w |A| of each sign over a micro-batch, without factors that need a forward pass."""
        inputs = without_masked_values(inputs)
        logps = _any_logps(inputs)
        tokens = self._weighed(inputs, logps, logps, ())
        return size_contributions(torch.ones_like(tokens.ratio), tokens.advantages, tokens.weights)

    def _weighed(self, inputs, per_token_logps, old_per_token_logps, factors) -> PolicyTokens:
        is_of_sequences = self._loss.is_of_sequences
        if "importance_sampling_ratio" in inputs and not is_of_sequences:
            factors = [*factors, inputs["importance_sampling_ratio"]]
        return policy_tokens(
            per_token_logps,
            old_per_token_logps,
            inputs["advantages"],
            policy_mask(inputs),
            weighs_by_length=self._loss.weighs_by_length,
            importance_sampling_level="token" if is_of_sequences else self._settings.importance_sampling_level,
            weighting=self._settings.contribution_weighting,
            factors=factors,
        )


def _any_logps(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return log-probabilities for samples of the current policy, whose ratios are 1 whatever the values."""
    return known_old_logps(inputs, torch.zeros_like(inputs["completion_mask"], dtype=torch.float32))


class BatchUpdates:
    """
    Run the clip-bound search of each update on the micro-batches of TRL's buffer. All ranks make the same calls.

    `bounds` is the controller.
    """

    def __init__(self, trainer: Any, micro_batches: MicroBatches):
        accelerator = trainer.accelerator
        self._settings, self._micro_batches, self._policy_loss = trainer.args, micro_batches, PolicyLoss(trainer)
        self._sum_ranks = partial(accelerator.reduce, reduction="sum")
        self._buffer: Sequence[Mapping[str, Any]] | None = None  # the buffer that `_totals` belong to
        self._totals: list[Contributions] = []  # total absolute advantages of each micro-batch, of all ranks
        self._num_expected = 0  # micro-batches of the current update that were in the buffer as it began, and are left
        self.bounds = ClipBoundController(
            trainer.args,
            accelerator.device,
            reduce=self._sum_ranks,
            gather=accelerator.gather,
            update=lambda: trainer.state.global_step + 1,
        )

    def begin(self, buffer: Sequence[Mapping[str, Any]] | None, step: int, count: int, are_fresh: bool) -> ClipBounds:
        """
        Begin the update of `count` micro-batches that starts at micro-batch `step` of the run; return its bounds.

        `buffer` holds the micro-batches of the current pass, and is the same object in all its updates; `None` if the
        caller computes the loss of another batch. `are_fresh` says whether the current policy sampled all of them.
        If the update spans two generation steps, its bounds are those for its micro-batches of the first one.
        """
        settings = self._settings
        window = self._micro_batches.begin_update(step, count)
        if buffer is None:
            self._num_expected = count
            return self.bounds.begin()
        self._num_expected, is_whole = len(window), len(window) == count
        totals = read_ahead = None
        if settings.is_adaptive and settings.search_scope != "micro_batch":
            # With a single micro-batch, its loss has the tokens before it needs the bounds
            ahead = [buffer[position] for position in window] if count > 1 else []
            is_read = True
            if self.bounds.carries_over:
                is_new_buffer = buffer is not self._buffer
                is_read = count == 1 or (is_new_buffer and self._policy_loss.know_ratios(ahead, are_fresh))
                if is_new_buffer:
                    self._sum_advantages(buffer)
                totals = reduce(operator.add, [self._totals[position] for position in window])
            if is_read:
                read_ahead = partial(self._policy_loss.tokens_ahead, ahead, are_fresh)
        return self.bounds.begin(totals, read_ahead, is_whole)

    def _sum_advantages(self, buffer: Sequence[Mapping[str, Any]]) -> None:
        """Compute the total absolute advantages of a buffer, with one reduction for all its updates."""
        here = [self._policy_loss.total_absolute_advantages(inputs).as_vector() for inputs in buffer]
        totals = self._sum_ranks(torch.stack(here))
        self._buffer, self._totals = buffer, [Contributions.from_vector(each, SINGLE_POINT) for each in totals]

    @torch.no_grad()
    def observe(
        self,
        inputs: dict[str, Any],
        per_token_logps: torch.Tensor,
        entropies: torch.Tensor | None,
        version: int,
        is_last: bool,
    ) -> ClipBounds:
        """
        Add a micro-batch, with log-probabilities and entropies `(B, T)` under the policy of this version.

        Returns the bounds to train it with. The advantages in `inputs` are replaced by their weighted values, times
        the factor of the micro-batch.
        """
        self._num_expected -= 1
        if self._num_expected < 0 and self.bounds.carries_over:  # of the second generation step
            totals = self._sum_ranks(self._policy_loss.total_absolute_advantages(inputs).as_vector())
            self.bounds.add_totals(Contributions.from_vector(totals, SINGLE_POINT))
        tokens = self._policy_loss.tokens(inputs, per_token_logps, entropies)
        bounds = self.bounds.observe(tokens, version - versions_of(inputs), is_last)
        advantages = tokens.advantages
        if self._settings.negative_weight_min < 1:
            advantages = tokens.balanced_advantages(bounds.negative_weight)
        inputs["advantages"] = advantages * self._micro_batches.policy_factor
        return bounds

    def close(self, values: MutableMapping[str, list[float]]) -> dict[str, float]:
        """End the update: return its metrics, and reduce TRL's `values`, see [`MicroBatches.close`]."""
        return self._micro_batches.close(values, self.bounds.close())
