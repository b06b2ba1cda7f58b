"""The methods by name, as settings, beside those of flags and recipes."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ...bapo_config import BAPOConfig, own_fields
from ...batch.losses import CLIPPED_LOSS_TYPES
from ...errors import InputError


def _fixed_bounds(low: float, high: float) -> dict[str, float]:
    return {"ratio_lower_start": low, "ratio_lower_max": low, "ratio_upper_start": high, "ratio_upper_max": high}


TRL = "trl"

METHODS: Mapping[str, Mapping[str, Any]] = {
    TRL: {  # TRL's trainer, with its defaults
        **_fixed_bounds(0.8, 1.2),
        "steps_per_generation": None,
        "num_iterations": 1,
        "micro_batch_layout": "padded",
        "skip_zero_advantage": False,
    },
    "grpo": _fixed_bounds(0.8, 1.2),
    "clip_higher": _fixed_bounds(0.8, 1.28),  # DAPO's
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
    "gspo": {**_fixed_bounds(1 - 3e-4, 1 + 4e-4), "importance_sampling_level": "sequence", "loss_type": "grpo"},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
    "recommended": {"loss_type": "vespo"},
}
"""Settings of each method. For TRL's other losses, they are the paper settings in TRL's documentation."""

METHOD_SETTINGS = (
    *(f"ratio_{side}_{part}" for side in ("lower", "upper") for part in ("start", "max", "step")),
    "positive_contribution_target", "contribution_measure", "search_order", "negative_weight_min",
    "negative_weight",
    "delta", "importance_sampling_level", "epsilon_high",
)  # fmt: skip
"""Settings that define a method, besides the loss."""

# An evaluation ignores these and the settings of replay and partial rollouts, which may be invalid for its processes
_TRAINING_SETTINGS = {
    "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size",
    "num_iterations", "learning_rate", "method", "loss_type", "epsilon", *METHOD_SETTINGS, "eval_strategy",
    "save_strategy", "load_best_model_at_end", "resume_from_checkpoint", "merge_adapter", "push_to_hub",
}  # fmt: skip


def apply_method(flags: Mapping[str, str], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return a recipe with the settings of the method that a flag or the recipe names, and without another method's.

    Settings given beside the method are kept; one that contradicts the method raises an `InputError`.
    """
    name = flags.get("method", recipe.get("method"))
    if name is None:
        return dict(recipe)
    if str(name) not in METHODS:  # YAML may give a list
        raise InputError(f"`method` is {name!r}: set it to one of {', '.join(METHODS)}.")
    method = METHODS[name]
    beside = flags if "method" in flags else {**recipe, **flags}
    defaults = {field.name: field.default for field in fields(BAPOConfig)}
    settings = {field: defaults[field] for field in METHOD_SETTINGS}
    if name == TRL:
        settings = {field.name: field.default for field in own_fields()}
    settings |= method
    if {**recipe, **flags}.get("loss_type", "dapo") not in CLIPPED_LOSS_TYPES:
        settings.setdefault("loss_type", defaults["loss_type"])  # methods that set no loss need one with clip bounds
    for field, value in beside.items():
        is_of_method = field in (settings if name == TRL else method) or (field == "loss_type" and field in settings)
        if is_of_method and str(value) != str(settings[field]):
            raise InputError(
                f"`method` is '{name}', which sets `{field}` to {settings[field]!r}, but `{field}` is {value!r}: "
                "remove one of them."
            )
    return {**recipe, **{field: value for field, value in settings.items() if field not in beside}}


def without_training(recipe: Mapping[str, Any], has_group: bool) -> dict[str, Any]:
    """Return the settings of a recipe that an evaluation uses; `num_generations` becomes `num_generations_eval`."""
    kept = {
        name: value
        for name, value in recipe.items()
        if name not in _TRAINING_SETTINGS and not name.startswith(("replay_", "partial_rollout_"))
    }
    group = kept.pop("num_generations", None)
    return kept if group is None or has_group else {"num_generations_eval": group, **kept}
