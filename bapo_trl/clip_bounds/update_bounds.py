"""The bounds of each update of a run: chosen, used and logged from its first micro-batch to its last."""

import functools
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast

from ..checkpoints.rank_errors import raising_on_all_ranks
from .carried_curves import CarriedCurves
from .curves import Contributions, contributions, size_contributions
from .grid import SINGLE_POINT
from .search import ClipBounds, search_bounds, share_under
from .tokens import PolicyTokens
from .update_log import UpdateLog, measure_tokens, unlogged_metrics


Batch = Mapping[str, Any]


class UpdateBounds:
    """
    Chooses the clip bounds of each update of a run, and collects what is logged of it.

    An update is `begin`, `observe` for each of its micro-batches, `close`. All ranks make the same calls. `current` is
    the outcome of the latest search; before the first one, the start bounds.

    `settings` are a [`~bapo_config.BAPOConfig`]. `read_tokens` takes a micro-batch, its log-probabilities and
    entropies, `(B, T)` each; `read_masses` returns the sum of w |A| of each sign, as curves of one point.
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
        self._grid = settings.bound_grid
        self._curves: Contributions | None = None  # of the tokens since the last search, of this rank
        self._carried = CarriedCurves(self._grid, accelerator.device)
        self._log = UpdateLog(unlogged_metrics(settings))
        nothing = torch.zeros((), device=accelerator.device)
        self.current = self._search(self._carried.scaled_to(Contributions(nothing, nothing)))
        self._carries_over = settings.search_scope == "carried_over" and settings.is_adaptive
        self._searches_ahead = self._forecasts = False  # in the current update
        self._masses_of_buffer: list[Contributions] = []  # of each micro-batch, of all ranks
        self._buffer_of_masses: Sequence[Batch] | None = None
        self._masses_of_update: Contributions | None = None
        # Of each micro-batch, by the id of the original, which is held: else another tensor may get that id
        self._versions_on_device: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def is_open(self) -> bool:
        """Whether a micro-batch of the current update has been observed."""
        return self._log.is_open

    def begin(
        self, buffer: Sequence[Batch] | None, window: Sequence[int], read_ahead: Callable[[], Sequence[PolicyTokens]]
    ) -> ClipBounds:
        """
        Begin an update; choose its bounds, if they are due before the log-probabilities of all its tokens are known.

        `buffer` holds the micro-batches of the current pass, the same object for all its updates; `None` for a loss of
        a batch of the caller's own. `window` has the positions in it of those of the update, and `read_ahead` returns
        the tokens of these as their losses will see them.
        """
        self._copy_versions(buffer, window)
        self._searches_ahead = self._forecasts = False
        self._masses_of_update = None
        if buffer is None or not self._settings.is_adaptive or self._settings.search_scope == "micro_batch":
            return self.current
        if self._carries_over:
            self._forecasts = self._buffer_of_masses is buffer  # else the first update on these samples
            if not self._forecasts:
                self._take_masses(buffer)
            self._masses_of_update = functools.reduce(operator.add, [self._masses_of_buffer[i] for i in window])
        if self._forecasts:  # not logged yet: it will be with the shares of its own tokens
            self.current = self._search(self._carried.scaled_to(self._masses_of_update))
        elif len(window) > 1:  # the loss of a single one knows its tokens before it needs the bounds
            self._searches_ahead = True
            for tokens in read_ahead():
                self._add(tokens)
            self._use(self._search(self._take_curves()))
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
        Take in a micro-batch; where a weight is searched, scale the advantages of its negative tokens, in `inputs`.

        Log-probabilities under the current policy, of this version, and entropies are `(B, T)`. With the micro-batch
        that `is_last`, the update ends.
        """
        tokens = self._read_tokens(inputs, per_token_logps, entropies)
        if not self._searches_ahead:
            self._add(tokens)
            if is_last or self._settings.search_scope == "micro_batch":
                curves = self._take_curves()
                self._use(share_under(self.current, curves, self._grid) if self._forecasts else self._search(curves))
        if self._settings.negative_weight_min < 1:
            inputs["advantages"] = tokens.balanced_advantages(self.current.negative_weight)

        guarded = {name: inputs.get(name) for name in ("old_per_token_logps", "ref_per_token_logps")}
        guarded["per_token_logps"] = per_token_logps
        versions = _versions(inputs)
        _, on_device = self._versions_on_device.get(id(versions), (versions, versions))
        staleness = version - on_device
        self._log.add(measure_tokens(tokens, staleness, guarded, self.current, self._settings.delta))
        return self.current

    def close(self, update: int) -> tuple[dict[str, float], list[bool]]:
        """
        Return the metrics of the update, see [`UpdateLog.close`], which may raise.

        With them comes whether each of its micro-batches has a token of the loss on any rank.
        """
        return self._log.close(self._accelerator.gather, update=update), self._log.have_tokens

    def save(self, folder: str) -> None:
        """Write the curves that are carried over into a checkpoint folder."""
        if self._carries_over:
            self._carried.save(folder)

    def load(self, folder: str) -> None:
        """
        Restore them, on all ranks as the first one finds them. All ranks make this call together.

        Without them there, the first update starts as in a new run, with a warning.
        """
        if not self._carries_over:
            return
        with raising_on_all_ranks():
            if self._accelerator.is_main_process and not self._carried.load(folder):
                warnings.warn(
                    f"The checkpoint {folder} holds no carried curves on these candidate bounds (`search_scope` "
                    "'carried_over'): a sign of advantages that the first update lacks counts as in fresh samples."
                )
        self._carried.share(broadcast)

    def _add(self, tokens: PolicyTokens) -> None:
        """Add the tokens of a micro-batch to those of the next search."""
        settings = self._settings
        if tokens.gradient_size is None:
            curves = contributions(
                tokens.ratio,
                tokens.advantages,
                tokens.weights,
                self._grid,
                measure=settings.contribution_measure,
                delta=settings.delta,
            )
        else:
            curves = size_contributions(tokens.gradient_size, tokens.advantages, tokens.weights)
        self._curves = curves if self._curves is None else self._curves + curves

    def _take_curves(self) -> Contributions:
        """Return the curves of the tokens since the last search, of all ranks; learn them if they are carried over."""
        total = self._accelerator.reduce(self._curves.as_vector(), reduction="sum")
        self._curves = None
        curves = Contributions.from_vector(total, self._grid)
        if self._masses_of_update is not None:
            self._carried.learn(curves, self._masses_of_update)
        return curves

    def _search(self, curves: Contributions) -> ClipBounds:
        settings = self._settings
        target, smallest = settings.positive_contribution_target, settings.negative_weight_min
        bounds = search_bounds(curves, self._grid, target, settings.search_order, smallest)
        if settings.has_constant_weight:
            bounds = replace(bounds, negative_weight=torch.full_like(bounds.negative_weight, smallest))
        return bounds

    def _use(self, bounds: ClipBounds) -> ClipBounds:
        self._log.searches.append(bounds)
        self.current = bounds
        return bounds

    def _copy_versions(self, buffer: Sequence[Batch] | None, window: Sequence[int]) -> None:
        """Copy the versions that sampled the update's rows to the device, at once: they lie on the CPU."""
        originals = [] if buffer is None else [_versions(buffer[position]) for position in window]
        copies = torch.stack(originals).to(self._accelerator.device, non_blocking=True) if originals else ()
        self._versions_on_device = {id(each): (each, copy) for each, copy in zip(originals, copies, strict=True)}

    def _take_masses(self, buffer: Sequence[Batch]) -> None:
        masses = torch.stack([self._read_masses(inputs).as_vector() for inputs in buffer])
        totals = self._accelerator.reduce(masses, reduction="sum")
        self._masses_of_buffer = [Contributions.from_vector(total, SINGLE_POINT) for total in totals]
        self._buffer_of_masses = buffer


def _versions(inputs: Batch) -> torch.Tensor:
    """Return the policy versions that sampled a micro-batch: `(B,)`, or `(B, T)` where its tokens have several."""
    return inputs.get("token_versions", inputs["policy_version"])
