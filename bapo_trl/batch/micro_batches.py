"""The micro-batches of a pass over TRL's buffer: their layout, and what the loss and the log need to know of it."""

import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from .layout import MicroBatch, lay_out, measure, plan, scoring_chunks, update_starts
from .losses import LOSSES
from .policy_loss import FORWARD_KEYS
from .samples import unknown_keys
from .scoring import padding_counts
from .update_means import OF_TOKENS, average_update


class MicroBatches:
    """
    Lay out TRL's buffer for each pass of a run, and collect the numbers of the current update's micro-batches.

    Invariant: an update has the samples that it has in TRL's layout, less those that are skipped.
    """

    def __init__(self, trainer: Any):
        settings = self._settings = trainer.args
        self._accelerator = trainer.accelerator
        parts = {
            "kl": trainer.beta != 0,
            "entropy": trainer._entropy_bonus_enabled or trainer.top_entropy_quantile < 1,
            "router": trainer.aux_loss_enabled,
        }
        loss_parts = [name for name, is_there in parts.items() if is_there]  # besides the policy loss
        self.layout, self._skips = settings.micro_batch_layout, settings.skip_zero_advantage and not loss_parts
        is_mixed = settings.uses_replay or settings.uses_partial_rollouts
        needs_probe = (self.layout != "padded" or is_mixed) and not trainer._is_vlm
        self._padding_counts = partial(padding_counts, trainer) if needs_probe else None
        self._keeps_prompt_padding = False
        self._buffer: list[dict[str, Any]] | None = None  # that is laid out
        self._planned: list[MicroBatch] = []  # at each position of the buffer
        self._has_token_advantages = False
        self._factors = 1.0, 1.0  # of the current update: for its policy and KL terms, and for its whole loss
        self.policy_factor = 1.0  # of the micro-batch that was taken last, for its policy and KL terms
        self._update: list[MicroBatch] = []  # of which a loss was computed in the current update
        self._reason: str | None = None  # why samples can't be rearranged, until it is said
        self._trim_if(why_trimmed(settings, loss_parts))

    @property
    def keeps_prompt_padding(self) -> bool:
        """Whether prompts keep TRL's padding, as the model counts it."""
        # Not before a generation has sent the weights: a forward pass leaves some that FSDP2 cannot send
        probe, self._padding_counts = self._padding_counts, None
        if probe is not None:
            self._keeps_prompt_padding = probe()
        return self._keeps_prompt_padding

    def lay_out(self, buffer: list[dict[str, Any]], step: int, begin: int, count: int) -> None:
        """
        Lay out a buffer, in place, unless it is the one that was laid out last. All ranks make this call together.

        The run is at micro-batch `step`, in an update of `count` micro-batches that began with micro-batch `begin`.
        """
        if buffer is self._buffer:
            return
        settings = self._settings
        of_generation = step % settings.micro_batches_per_generation
        starts = update_starts(
            begin - (step - of_generation),
            count,
            settings.gradient_accumulation_steps,
            settings.steps_per_generation,
            settings.num_iterations,
        )
        measures = self._measure(buffer)
        if self.layout != "balanced":
            starts = list(range(len(buffer)))
        self._planned = plan(
            measures,
            self._accelerator.process_index,
            starts,
            settings.per_device_train_batch_size,
            layout=self.layout,
            skips=self._skips,
            mean_over=LOSSES[settings.loss_type].mean_over,
            multiple=settings.pad_to_multiple_of or 1,
        )
        self._has_token_advantages = buffer[0]["advantages"].dim() == 2
        if self.layout != "padded":
            buffer[:] = lay_out(buffer, self._planned, starts)
        self._buffer = buffer

    def begin_update(self, step: int, count: int) -> list[int]:
        """
        Begin the update of `count` micro-batches, the first of which is micro-batch `step` of the run.

        Return the positions in the buffer of those that belong to the same generation.
        """
        settings, self._update = self._settings, []
        left = settings.micro_batches_per_generation - step % settings.micro_batches_per_generation
        places = [(step + i) % settings.steps_per_generation for i in range(min(count, left))]
        if self._planned:
            self._factors = self._without_fillers([self._planned[place] for place in places], count - len(places))
        return places

    def _without_fillers(self, update: Sequence[MicroBatch], num_later: int) -> tuple[float, float]:
        """
        Return factors of an update's policy and KL terms, and of its whole loss, with which fillers have no effect.

        They would change the means that a loss takes over the samples of a micro-batch, and over the micro-batches of
        an update. The update has these micro-batches, and `num_later` of the next generation step. The latter have no
        fillers: only the first generation step of partial rollouts is too short.
        """
        size, num_ranks = self._settings.per_device_train_batch_size, self._accelerator.num_processes
        num_rows = sum(each.trl_real for each in update) + num_later * size * num_ranks
        num_filled = sum(each.trl_filled for each in update) + num_later * num_ranks
        if not num_rows:
            return 1.0, 1.0
        whole = (len(update) + num_later) * num_ranks / num_filled
        of_policy = {"samples": size * num_filled / num_rows, "tokens": 1.0, "generation": 1 / whole}
        return of_policy[LOSSES[self._settings.loss_type].mean_over], whole

    def take(self, step: int, inputs: Mapping[str, Any]) -> tuple[float, float]:
        """
        Add micro-batch `step` of the run to the current update; return the factors of its loss.

        The second is 0 for fillers alone, which a router loss would count.
        """
        self.policy_factor, whole = self._factors
        if self._planned:  # else a loss without a buffer, of a batch from elsewhere
            planned = self._planned[step % self._settings.steps_per_generation]
            self._update.append(planned)
            self.policy_factor *= planned.factor
        is_filler = inputs.get("is_filler")
        return self.policy_factor, 0.0 if is_filler is not None and bool(is_filler.all()) else whole

    @property
    def num_tokens(self) -> int:
        """Tokens of the loss of the current update so far, over all ranks, with those of skipped samples."""
        return sum(each.trl_loss_tokens for each in self._update)

    def close(self, values: MutableMapping[str, list[float]], of_tokens: Mapping[str, float]) -> dict[str, float]:
        """
        End the update: return its metrics, and reduce TRL's values of its micro-batches to means over its tokens.

        In TRL's layout, the values stay those of TRL, less those of micro-batches without a token of the loss.
        `of_tokens` are metrics of the update that are undefined if it has no such token.
        """
        update, self._update = self._update, []
        if not update:
            return dict(of_tokens)
        if not any(each.trl_loss_tokens for each in update):
            of_tokens = dict.fromkeys(of_tokens, math.nan)
        of_samples = set() if self._has_token_advantages else {"vespo/phi_seq_mean"}
        if of_samples and self._settings.importance_sampling_level == "sequence":
            of_samples |= {name for name in OF_TOKENS if "clip" in name}
        average_update(values, update, of_samples, is_padded=self.layout == "padded")
        unpadded, real = (sum(getattr(each, name) for each in update) for name in ("unpadded", "trl_real"))
        return {
            **of_tokens,
            "bapo/masked_share": sum(each.trl_masked for each in update) / sum(each.trl_rows for each in update),
            "padding/computed": sum(each.computed for each in update) / unpadded if unpadded else math.nan,
            "padding/skipped": sum(each.skipped for each in update) / real if real else math.nan,
        }

    def divides(self, arguments: Mapping[str, Any]) -> bool:
        """Return whether a scoring pass with these keyword arguments of TRL's can be rearranged: text, in parts."""
        others = [value for name, value in arguments.items() if name not in ("batch_size", "compute_entropy")]
        is_plain = all(value is None or value is False for value in others)
        return self._settings.micro_batch_layout != "padded" and is_plain and arguments.get("batch_size") is not None

    def score(
        self,
        score: Callable[..., tuple],
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        num_tokens: int,
        *,
        batch_size: int,
        compute_entropy: bool = False,
        **absent: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        """
        Return log-probabilities and entropies, `(B, T)`, in as many passes as TRL makes, with less padding.

        `score` makes a pass. Tokens beyond its width, all of them padding, get 0.
        """
        layout, multiple = self._settings.micro_batch_layout, self._settings.pad_to_multiple_of or 1
        results: list[torch.Tensor] = []
        for chunk in scoring_chunks(
            attention_mask, num_tokens, batch_size, layout, self.keeps_prompt_padding, multiple
        ):
            tokens, mask = (values[chunk.rows, chunk.columns] for values in (input_ids, attention_mask))
            output = score(tokens, mask, chunk.completion_width, compute_entropy=compute_entropy)
            scores = output[: 2 if compute_entropy else 1]
            results = results or [each.new_zeros(len(input_ids), num_tokens) for each in scores]
            for result, each in zip(results, scores, strict=True):
                result[chunk.rows, : chunk.completion_width] = each
        logps, entropies = results if compute_entropy else (*results, None)
        return logps, entropies, None

    def _measure(self, buffer: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """
        Return the measures of all ranks' samples, `(N, R, 8)`, with one transfer.

        If samples can't be rearranged on some rank, all ranks fall back to `trimmed` for the rest of the run.
        """
        of_rank = torch.cat([measure(each, self.keeps_prompt_padding) for each in buffer])
        reason = why_in_place(buffer[0])
        can_move = of_rank.new_full((len(of_rank), 1), reason is None)
        measures = self._accelerator.gather(torch.cat([of_rank, can_move], dim=1).unsqueeze(0)).cpu().numpy()
        if not measures[..., -1].all():
            self._skips = False
            self._trim_if(reason or "samples of another rank have images or other values")
        if self._reason is not None:
            self._accelerator.print(
                f"Micro-batches are cut to their longest sample, but not balanced: {self._reason}."
            )
            self._reason = None
        return measures[..., :-1]

    def _trim_if(self, reason: str | None) -> None:
        if reason is not None and self.layout == "balanced":
            self.layout, self._reason = "trimmed", reason


def why_in_place(batch: Mapping[str, Any]) -> str | None:
    """Return why the samples of TRL's batch can't change places, or `None`: it has more than text."""
    if any(batch.get(key) is not None for key in FORWARD_KEYS):
        return "samples have images"
    unknown = unknown_keys(batch)
    return f"the batch has `{unknown[0]}`" if unknown else None


def why_trimmed(settings: Any, loss_parts: Sequence[str]) -> str | None:
    """Return why the micro-batches of a run can't be balanced, if the loss depends on which samples share one."""
    if LOSSES[settings.loss_type].mean_over == "tokens":
        return f"`loss_type` '{settings.loss_type}' is a mean over the tokens of a micro-batch"
    if "entropy" in loss_parts:
        return "the entropy bonus and `top_entropy_quantile` are computed over a micro-batch"
    if "router" in loss_parts:
        return "the router's loss is computed over a micro-batch"
    if settings.search_scope == "micro_batch" and settings.is_adaptive:
        return "`search_scope` is 'micro_batch'"
    return None
