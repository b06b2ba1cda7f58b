"""Feeds TRL's micro-batches to the clip-bound controller, one optimizer update after the other."""

import operator
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial, reduce
from typing import Any

import torch
from accelerate import Accelerator

from ..clip_bounds import ClipBounds, Contributions
from ..clip_bounds.controller import ClipBoundController
from ..clip_bounds.grid import SINGLE_POINT
from ..upstream.forward_passes import has_random_forward
from .micro_batches import MicroBatches
from .policy_loss import PolicyLoss
from .samples import versions_of
from .scoring import score_ahead


class BatchUpdates:
    """
    Run the clip-bound search of each update on the micro-batches of TRL's buffer. All ranks make the same calls.

    `bounds` is the controller. `update` returns the number of the current update, for messages.
    """

    def __init__(
        self,
        settings: Any,
        accelerator: Accelerator,
        policy_loss: PolicyLoss,
        micro_batches: MicroBatches,
        update: Callable[[], int],
    ):
        self._settings, self._policy_loss, self._micro_batches = settings, policy_loss, micro_batches
        self._sum_ranks = partial(accelerator.reduce, reduction="sum")
        self._buffer: Sequence[Mapping[str, Any]] | None = None  # the buffer that `_totals` belong to
        self._totals: list[Contributions] = []  # total absolute advantages of each micro-batch, of all ranks
        self._num_expected = 0  # micro-batches of the current update that were in the buffer as it began, and are left
        self.bounds = ClipBoundController(
            settings, accelerator.device, reduce=self._sum_ranks, gather=accelerator.gather, update=update
        )

    def begin(self, buffer: Sequence[Mapping[str, Any]] | None, step: int, count: int, are_fresh: bool) -> ClipBounds:
        """
        Begin the update of `count` micro-batches that starts at micro-batch `step` of the run; return its bounds.

        `buffer` holds the micro-batches of the current pass, and is the same object in all its updates; `None` if the
        caller computes the loss of another batch. `are_fresh` says whether the current policy sampled all of them.
        If the update spans two generation steps, its bounds are those for its micro-batches of the first one.
        """
        settings = self._settings
        self._micro_batches.begin_update(step, count)
        if buffer is None:
            self._num_expected = count
            return self.bounds.begin()
        left = settings.micro_batches_per_generation - step % settings.micro_batches_per_generation
        window = [(step + i) % settings.steps_per_generation for i in range(min(count, left))]
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
        inputs["advantages"] = advantages * self._micro_batches.scale.policy
        return bounds

    def close(self, values: MutableMapping[str, list[float]]) -> dict[str, float]:
        """End the update: return its metrics, and reduce TRL's `values`, see [`MicroBatches.close`]."""
        return self._micro_batches.close(values, self.bounds.close())


def make_updates(trainer: Any, micro_batches: MicroBatches) -> BatchUpdates:
    """Return the updates of a run."""
    policy_loss = PolicyLoss(
        trainer.args,
        score_ahead=partial(score_ahead, trainer),
        off_policy_mask=trainer.get_off_policy_mask,
        entropy_mask=trainer.get_high_entropy_mask,
        is_random=has_random_forward(trainer.model, trainer.neftune_noise_alpha),
    )
    args, accelerator = trainer.args, trainer.accelerator
    return BatchUpdates(args, accelerator, policy_loss, micro_batches, lambda: trainer.state.global_step + 1)
