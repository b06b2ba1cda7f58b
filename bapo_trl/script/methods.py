"""`--method`: one name for the settings that make a method."""

import math
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from ..advice import ADVICE
from ..bapo_config import BAPOConfig
from ..errors import InputError
from ..losses import CLIPPED_LOSS_TYPES


def fixed_bounds(low: float, high: float) -> dict[str, float]:
    """Return the settings of a fixed clip range in ratio space, which leave nothing to search."""
    return {"ratio_lower_start": low, "ratio_lower_max": low, "ratio_upper_start": high, "ratio_upper_max": high}


METHODS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "grpo": fixed_bounds(0.8, 1.2),
        "clip_higher": fixed_bounds(0.8, 1.28),  # DAPO's
        "bapo": {},
        "bapo_released": {
            "positive_contribution_target": 0.33333333,
            "ratio_lower_start": 0.8,
            "ratio_lower_max": 0.95,
            "ratio_lower_step": 0.05,
            "ratio_upper_start": 1.2,
            "ratio_upper_max": 2.0,
            "ratio_upper_step": 0.1,
            "contribution_measure": "surrogate",
            "search_order": "lower_first",
            "search_scope": "micro_batch",
            "delta": 3.0,
        },
        "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
        "gspo": {
            **fixed_bounds(1 - 3e-4, 1 + 4e-4),
            "importance_sampling_level": "sequence",
            "loss_type": "grpo",
        },
        "sapo": {"loss_type": "sapo"},
        "vespo": {"loss_type": "vespo"},
        "recommended": ADVICE,
    }
)
"""Settings by method. Those of TRL's other losses are the ones that TRL's documentation gives for their papers."""

MADE_OF = (
    *(f"ratio_{side}_{part}" for side in ("lower", "upper") for part in ("start", "max", "step")),
    "positive_contribution_target", "contribution_measure", "search_order", "negative_weight_min",
    "delta", "importance_sampling_level", "epsilon_high",
)  # fmt: skip
"""Settings that make a method, besides the loss."""


def settings_of_method(name: str, loss_type: str) -> dict[str, Any]:
    """
    Return the settings that a method stands for, those of a recipe that are not of it set back to their defaults.

    `loss_type` is the loss without the method. One without clip bounds does not stay. A method that is not known is
    refused (`InputError`).
    """
    if not isinstance(name, str) or name not in METHODS:
        raise InputError(f"`method` is {name!r}: set it to one of {', '.join(METHODS)}.")
    defaults = {f.name: f.default for f in fields(BAPOConfig)}
    settings = {field: defaults[field] for field in MADE_OF}
    if loss_type not in CLIPPED_LOSS_TYPES:
        settings["loss_type"] = defaults["loss_type"]
    return settings | dict(METHODS[name])


def check_method(name: str, named: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """
    Refuse a method that settings named next to it contradict (`InputError`).

    These are text or values. Of `settings`, which [`settings_of_method`] returned, one that the method leaves at its
    default may be another.
    """
    defaults = {f.name: f.default for f in fields(BAPOConfig)}
    for field, value in named.items():
        wanted = settings.get(field, defaults.get(field))
        is_loss_without_bounds = field == "loss_type" and value not in CLIPPED_LOSS_TYPES
        is_of_method = field in settings and wanted != defaults[field]
        if (is_of_method or is_loss_without_bounds) and not _is_same(value, wanted):
            raise InputError(
                f"`method` is '{name}', which sets `{field}` to {wanted!r}, and `{field}` is {value!r}: leave one of "
                "them out."
            )


def _is_same(value: Any, wanted: Any) -> bool:
    """Whether a value, or what a command line has for it, is what a method sets."""
    if isinstance(wanted, float):
        try:
            return math.isclose(float(value), wanted)
        except (TypeError, ValueError):
            return False
    return str(value) == str(wanted)
