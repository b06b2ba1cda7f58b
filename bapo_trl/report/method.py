"""Which method a run trains with, and what of it is open to a change: by its settings, else by its logs. Pure.

The settings are JSON's, and this is read without torch: what follows from them is told as `BAPOConfig` has it, anew.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from .logs import Logs, is_finite


_LOSSES_WITHOUT_BOUNDS = ("cispo", "sapo", "vespo")
_OURS = (
    *(f"ratio_{s}_{part}" for s in ("lower", "upper") for part in ("start", "max", "step")),
    "negative_weight_min",
)
_OF_THE_SEARCH = {"positive_contribution_target", "contribution_measure", "search_order", "search_scope"}
_GRPO_BOUNDS = (0.8, 1.2)

EVIDENCE = ("bapo/search_steps", "bapo/negative_weight")
"""Metrics that tell what was searched, where the settings were not saved."""


@dataclass(frozen=True)
class Method:
    """The method of a run. Without settings it has no name and no limits, and what they would tell counts as open."""

    name: str = ""  # `BAPO`, `VESPO`, `GRPO bounds` and the like
    searches_lower: bool = True  # and it can have an effect
    searches_upper: bool = True
    searches_weight: bool = True  # of negative tokens, for each update
    can_weigh: bool = True  # `negative_weight_min` could be set, and is not
    can_refill: bool = True  # so `replay_zero_advantage`
    has_queue: bool = True
    has_stale_samples: bool = True  # without a queue as well
    uses_vllm: bool = True
    is_tempered: bool = True  # samples at another `temperature` than 1
    can_mask_truncated: bool = True  # `mask_truncated_completions` could be set, and is not
    has_highest_target: bool = False  # a `positive_contribution_target` of 1
    limits: tuple[tuple[str, float], ...] = ()  # of the bounds that are searched, by their metrics
    unused: frozenset[str] = frozenset()  # settings that have no effect with it

    @property
    def has_target(self) -> bool:
        """Whether anything is searched for `positive_contribution_target`."""
        return self.searches_lower or self.searches_upper or self.searches_weight

    @property
    def searches_lower_alone(self) -> bool:
        """Whether the lower bound is the only one that is searched."""
        return self.searches_lower and not self.searches_upper

    @property
    def can_raise_target(self) -> bool:
        """Whether a higher target would let more positive tokens through."""
        return self.searches_upper and not self.has_highest_target

    @property
    def can_be_fresher(self) -> bool:
        """Whether samples of past policies are trained, of which fewer could be."""
        return self.has_stale_samples or self.has_queue

    @property
    def can_weigh_less(self) -> bool:
        """Whether the weight is searched above a `negative_weight_min` that could be smaller."""
        return self.searches_weight and not self.can_weigh

    def has(self, name: str) -> bool:
        """Return whether one of the above holds; the empty name always does."""
        return not name or bool(getattr(self, name))


def method_of(settings: Mapping, logs: Logs) -> Method:
    """Return the method of a run by its settings, and by its logs if these do not hold it."""
    if isinstance(settings.get("loss_type"), str):
        return method_by_settings(settings)
    moves, weights = (logs.finite(metric).values for metric in EVIDENCE)
    if not len(weights):  # not of `BAPOTrainer`, or cut down
        return Method()
    has_bounds, has_weight = bool((moves > 0).any()), bool((weights < 1).any())
    return Method("", has_bounds, has_bounds, has_weight, can_weigh=not has_weight)


def method_by_settings(settings: Mapping) -> Method:
    """Return the method by the arguments of `BAPOTrainer`, or of `GRPOTrainer`, by name."""
    loss = settings["loss_type"]
    has_bounds = loss not in _LOSSES_WITHOUT_BOUNDS
    is_of_sequences = settings.get("importance_sampling_level") == "sequence"
    ours = [settings.get(name) for name in _OURS]
    if ours.count(None) == len(ours):
        name = loss.upper() if not has_bounds else "GSPO" if is_of_sequences else "GRPO"
        return Method(name, False, False, False, False, False, False, **_of_sampling(settings))
    if not all(map(is_finite, ours)):  # changed by hand
        return Method()
    smallest_weight = settings["negative_weight_min"]
    has_queue = _is_above(settings, "replay_fraction", 0) or bool(settings.get("replay_zero_advantage"))
    ends = {side: _end_of_search(settings, side) for side in ("lower", "upper")} if has_bounds else {}
    searched = {side: end for side, end in ends.items() if end > settings[f"ratio_{side}_start"]}
    is_constant = settings.get("positive_contribution_target") == 1 and not searched
    name = _name_of_bounds(settings, bool(searched), is_of_sequences) if has_bounds else loss.upper()
    if smallest_weight < 1:
        name += f", constant weight {smallest_weight:g}" if is_constant else f", weight from {smallest_weight:g}"
    searches_weight = smallest_weight < 1 and not is_constant
    unused = _unused_settings(has_bounds, searched, searches_weight)
    if not has_queue and _is_on_policy(settings):
        searched = {}  # without an effect
    return Method(
        name,
        "lower" in searched,
        "upper" in searched,
        searches_weight,
        can_weigh=smallest_weight == 1,
        can_refill=not settings.get("replay_zero_advantage"),
        has_queue=has_queue,
        **_of_sampling(settings),
        has_highest_target=settings.get("positive_contribution_target") == 1,
        limits=tuple((f"bapo/clip_{'low' if side == 'lower' else 'high'}", end) for side, end in searched.items()),
        unused=unused,
    )


def _of_sampling(settings: Mapping) -> dict[str, Any]:
    """Return what of the sampling is open to a change; all of it that the settings do not tell."""
    return {
        "has_stale_samples": not _is_on_policy(settings),
        "uses_vllm": settings.get("use_vllm") is not False,
        "is_tempered": settings.get("temperature") != 1,
        "can_mask_truncated": settings.get("mask_truncated_completions") is not True,
    }


def _unused_settings(has_bounds: bool, searched: Collection[str], searches_weight: bool) -> frozenset[str]:
    parts = ("max", "step") if has_bounds else ("start", "max", "step")
    names = {f"ratio_{side}_{part}" for side in ("lower", "upper") if side not in searched for part in parts}
    return frozenset(names if searched or searches_weight else names | _OF_THE_SEARCH)


def _name_of_bounds(settings: Mapping, is_searched: bool, is_of_sequences: bool) -> str:
    if is_searched:
        return "BAPO, ratios of sequences" if is_of_sequences else "BAPO"
    bounds = settings["ratio_lower_start"], settings["ratio_upper_start"]
    if not is_of_sequences and all(abs(a - b) < 1e-9 for a, b in zip(bounds, _GRPO_BOUNDS, strict=True)):
        return "GRPO bounds"
    between = f"bounds {bounds[0]:g} to {bounds[1]:g}"
    return f"GSPO, {between}" if is_of_sequences else f"Fixed {between}"


def _end_of_search(settings: Mapping, side: str) -> float:
    """Return the last candidate of a bound, as the grid of the search has it."""
    start, largest, step = (settings[f"ratio_{side}_{part}"] for part in ("start", "max", "step"))
    return start + step * math.floor((largest - start) / step + 1e-9) if step > 0 else start


def _is_on_policy(settings: Mapping) -> bool:
    """Whether all samples are trained by the policy that sampled them: ratios are 1, and no bound has an effect."""
    window, passes, batches = (
        settings.get(name) for name in ("gradient_accumulation_steps", "num_iterations", "steps_per_generation")
    )
    if not (isinstance(window, int) and isinstance(passes, int) and isinstance(batches, int)) or passes * batches < 1:
        return False
    return not _is_above(settings, "partial_rollout_oversampling", 1) and window % (passes * batches) == 0


def _is_above(settings: Mapping, name: str, value: float) -> bool:
    given = settings.get(name)
    return is_finite(given) and given > value
