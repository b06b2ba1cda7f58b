"""The bounds of each update of a run: chosen, used and logged from its first micro-batch to its last."""

import functools
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator

from .curves import Contributions
from .grid import SINGLE_POINT
from .run_search import BoundSearch
from .search import ClipBounds
from .tokens import PolicyTokens
from .update_log import UpdateLog, measure_tokens


Batch = Mapping[str, Any]


class UpdateBounds:
    """
    Chooses the clip bounds of each update of a run, and collects what is logged of it.

    An update is `begin`, `observe` for each of its micro-batches, `close`. All ranks make the same calls.

    Args:
        settings ([`~bapo_config.BAPOConfig`]): Of the run.
        accelerator ([`~accelerate.Accelerator`]): Of the run.
        read_tokens (`Callable`): Micro-batch, log-probabilities and entropies, `(B, T)` each, in;
            [`~tokens.PolicyTokens`] out.
        read_masses (`Callable`): Micro-batch in; the sum of w |A| of each sign out, as [`~curves.Contributions`] of
            one point.

    Attributes:
        current ([`~search.ClipBounds`]): Outcome of the latest search; before the first one, the start bounds.
    """

    def __init__(
        self,
        settings: Any,
        accelerator: Accelerator,
        *,
        read_tokens: Callable[[Batch, torch.Tensor, torch.Tensor | None], PolicyTokens],
        read_masses: Callable[[Batch], Contributions],
    ):
        self._settings, self._accelerator = settings, accelerator
        self._read_tokens, self._read_masses = read_tokens, read_masses
        self._search = BoundSearch(
            settings.bound_grid,
            measure=settings.contribution_measure,
            target=settings.positive_contribution_target,
            order=settings.search_order,
            delta=settings.delta,
            negative_weight_min=settings.negative_weight_min,
            has_constant_weight=settings.has_constant_weight,
            negative_ratio_cap=settings.negative_ratio_cap,
            device=accelerator.device,
            sum_over_ranks=partial(accelerator.reduce, reduction="sum"),
        )
        self._log = UpdateLog(settings.has_clip_bounds, has_target=not settings.has_constant_weight)
        self.current = self._search.start_bounds()
        self._carries_over = settings.search_scope == "carried_over" and settings.is_adaptive
        self._searches_ahead = False
        self._masses_of_buffer: list[Contributions] = []  # of each micro-batch, of all ranks
        self._buffer_of_masses: Sequence[Batch] | None = None
        self._masses_of_update: Contributions | None = None
        self._versions_on_device: dict[int, torch.Tensor] = {}  # of each micro-batch, by the id of the original

    @property
    def is_open(self) -> bool:
        """Whether a micro-batch of the current update has been observed."""
        return self._log.is_open

    def begin(
        self, buffer: Sequence[Batch] | None, window: Sequence[int], read_ahead: Callable[[], Sequence[PolicyTokens]]
    ) -> ClipBounds:
        """
        Begin an update; choose its bounds, if they are due before the log-probabilities of all its tokens are known.

        Args:
            buffer (sequence of `dict`, *optional*): The micro-batches of the current pass, the same object for all its
                updates. `None` for a loss of a batch of the caller's own.
            window (sequence of `int`): Positions in it of those of the update.
            read_ahead (`Callable`): Returns the tokens of these as their losses will see them.

        Returns:
            The bounds of its first micro-batch.
        """
        self._copy_versions(buffer, window)
        searches_batch = self._settings.search_scope == "batch" and len(window) > 1 and self._settings.is_adaptive
        self._searches_ahead = searches_batch or self._carries_over
        if not self._searches_ahead:
            return self.current
        is_first = self._buffer_of_masses is not buffer  # update on these samples
        if is_first or not self._carries_over:
            for tokens in read_ahead():
                self._search.add(tokens)
        if not self._carries_over:
            return self._use(self._search.choose())
        if is_first:
            self._take_masses(buffer)
        self._masses_of_update = functools.reduce(operator.add, [self._masses_of_buffer[i] for i in window])
        if is_first:  # nothing to carry over: the curves of the update itself
            self._search.carry(self._masses_of_update)
        self.current = self._search.choose_carried(self._masses_of_update)  # logged with the shares of its own tokens
        return self.current

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
        Take in a micro-batch; where a weight is searched, scale the advantages of its negative tokens.

        Args:
            inputs (`dict`): TRL's micro-batch. Its `advantages` are replaced.
            per_token_logps (`torch.Tensor`): Log-probabilities under the current policy, `(B, T)`.
            entropies (`torch.Tensor`, *optional*): Entropies, `(B, T)`.
            version (`int`): Of the current policy.
            is_last (`bool`): Whether the update ends with it.

        Returns:
            The bounds of its loss.
        """
        tokens = self._read_tokens(inputs, per_token_logps, entropies)
        if self._carries_over or not self._searches_ahead:
            self._search.add(tokens)
        if self._carries_over and is_last:
            curves = self._search.carry(self._masses_of_update)
            self._use(self._search.judge(self.current, curves))
        elif not self._searches_ahead and (is_last or self._settings.search_scope == "micro_batch"):
            self._use(self._search.choose())
        cap, delta = self._settings.negative_ratio_cap, self._settings.delta
        if self._settings.negative_weight_min < 1 or cap is not None:
            inputs["advantages"] = tokens.balanced_advantages(self.current.negative_weight, cap)

        guarded = {name: inputs.get(name) for name in ("old_per_token_logps", "ref_per_token_logps")}
        guarded["per_token_logps"] = per_token_logps
        versions = _versions(inputs)
        staleness = version - self._versions_on_device.get(id(versions), versions)
        mask = inputs["completion_mask"]
        self._log.add(measure_tokens(tokens, staleness, guarded, mask, self.current, delta, cap))
        return self.current

    def close(self, update: int) -> dict[str, float]:
        """
        Return the metrics of the update, see [`~update_log.UPDATE_METRICS`].

        Raises:
            RuntimeError: If a log-probability, an advantage or a ratio of a trained token is NaN or infinite.
        """
        return self._log.close(self._accelerator.gather, update=update)

    def save(self, folder: str) -> None:
        """Write the curves that are carried over into a checkpoint folder."""
        if self._carries_over:
            self._search.carried.save(folder)

    def load(self, folder: str) -> None:
        """Restore them. Without them there, the first update starts as in a new run, with a warning."""
        if self._carries_over and not self._search.carried.load(folder):
            warnings.warn(
                f"The checkpoint {folder} holds no carried curves on these candidate bounds: a sign of advantages "
                "that the first update lacks counts as in fresh samples."
            )

    def _use(self, bounds: ClipBounds) -> ClipBounds:
        self._log.searches.append(bounds)
        self.current = bounds
        return bounds

    def _copy_versions(self, buffer: Sequence[Batch] | None, window: Sequence[int]) -> None:
        """Copy the versions that sampled the update's rows to the device, at once: they lie on the CPU."""
        originals = [] if buffer is None else [_versions(buffer[position]) for position in window]
        copies = torch.stack(originals).to(self._accelerator.device) if originals else ()
        self._versions_on_device = dict(zip(map(id, originals), copies, strict=True))

    def _take_masses(self, buffer: Sequence[Batch]) -> None:
        masses = torch.stack([self._read_masses(inputs).as_vector() for inputs in buffer])
        totals = self._accelerator.reduce(masses, reduction="sum")
        self._masses_of_buffer = [Contributions.from_vector(total, SINGLE_POINT) for total in totals]
        self._buffer_of_masses = buffer


def _versions(inputs: Batch) -> torch.Tensor:
    """Return the policy versions that sampled a micro-batch: `(B,)`, or `(B, T)` where its tokens have several."""
    return inputs.get("token_versions", inputs["policy_version"])
