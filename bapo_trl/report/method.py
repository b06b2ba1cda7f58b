"""Which method a run trains with, and what of it is open to a change: by its settings, else by its logs. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from .logs import Logs, is_finite


_LOSSES_WITHOUT_BOUNDS = ("cispo", "sapo", "vespo")
_LOSSES_THAT_BOUND_RATIOS = ("sapo", "vespo")
_BOUND_PARTS = tuple(f"ratio_{side}_{part}" for side in ("lower", "upper") for part in ("start", "max", "step"))
_GRPO_BOUNDS = (0.8, 1.2)

EVIDENCE = ("bapo/search_steps", "bapo/negative_weight")
"""Metrics that tell what was searched, where the settings were not saved."""


@dataclass(frozen=True)
class Method:
    """
    The method of a run. Without settings it has no name, and what they would tell counts as open.

    Args:
        name (`str`): `BAPO`, `VESPO`, `GRPO bounds` and the like; empty if the settings do not tell.
        searches_lower (`bool`): Whether the lower clip bound is searched, and can have an effect.
        searches_upper (`bool`): Whether the upper clip bound is searched, and can have an effect.
        searches_weight (`bool`): Whether the weight of negative tokens is chosen for each update.
        can_weigh (`bool`): Whether `negative_weight_min` could be set, and is not.
        can_cap (`bool`): Whether `negative_ratio_cap` could be set, and is not.
        can_refill (`bool`): Whether `replay_zero_advantage` could be set, and is not.
        has_queue (`bool`): Whether there is a replay queue.
    """

    name: str = ""
    searches_lower: bool = True
    searches_upper: bool = True
    searches_weight: bool = True
    can_weigh: bool = True
    can_cap: bool = True
    can_refill: bool = True
    has_queue: bool = True

    @property
    def has_target(self) -> bool:
        """Whether anything is searched for `positive_contribution_target`."""
        return self.searches_lower or self.searches_upper or self.searches_weight


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
    ours = [settings.get(name) for name in (*_BOUND_PARTS, "negative_weight_min")]
    if ours.count(None) == len(ours):
        name = loss.upper() if not has_bounds else "GSPO" if is_of_sequences else "GRPO"
        return Method(name, False, False, False, can_weigh=False, can_cap=False, can_refill=False, has_queue=False)
    if not all(map(is_finite, ours)):  # changed by hand
        return Method()
    smallest_weight = settings["negative_weight_min"]
    lower, upper = (has_bounds and _is_searched(settings, side) for side in ("lower", "upper"))
    is_constant = settings.get("positive_contribution_target") == 1 and not (lower or upper)
    name = _name_of_bounds(settings, lower or upper, is_of_sequences) if has_bounds else loss.upper()
    if smallest_weight < 1:
        name += f", constant weight {smallest_weight:g}" if is_constant else f", weight from {smallest_weight:g}"
    has_queue = _is_above(settings, "replay_fraction", 0) or bool(settings.get("replay_zero_advantage"))
    has_effect = has_queue or not _is_on_policy(settings)
    return Method(
        name,
        lower and has_effect,
        upper and has_effect,
        smallest_weight < 1 and not is_constant,
        can_weigh=smallest_weight == 1,
        can_cap=loss not in _LOSSES_THAT_BOUND_RATIOS
        and settings.get("negative_ratio_cap") is None
        and settings.get("delta") is None,
        can_refill=not settings.get("replay_zero_advantage"),
        has_queue=has_queue,
    )


def _name_of_bounds(settings: Mapping, is_searched: bool, is_of_sequences: bool) -> str:
    if is_searched:
        return "BAPO, ratios of sequences" if is_of_sequences else "BAPO"
    bounds = settings["ratio_lower_start"], settings["ratio_upper_start"]
    if not is_of_sequences and all(abs(a - b) < 1e-9 for a, b in zip(bounds, _GRPO_BOUNDS, strict=True)):
        return "GRPO bounds"
    between = f"bounds {bounds[0]:g} to {bounds[1]:g}"
    return f"GSPO, {between}" if is_of_sequences else f"Fixed {between}"


def _is_searched(settings: Mapping, side: str) -> bool:
    start, largest, step = (settings[f"ratio_{side}_{part}"] for part in ("start", "max", "step"))
    return step > 0 and (largest - start) / step + 1e-9 >= 1  # as the grid of the search has it


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
