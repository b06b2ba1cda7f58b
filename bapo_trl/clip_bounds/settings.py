"""What the search refuses: values of its settings, and losses and updates that it does not go with."""

import math
from dataclasses import fields
from typing import Any

from ..errors import InputError
from ..losses import CLIPPED_LOSS_TYPES, LOSSES
from .curves import MEASURES
from .grid import BoundGrid
from .search import SEARCH_ORDERS
from .tokens import WEIGHTINGS


SCOPES = ("batch", "micro_batch", "carried_over")
BOUND_PARTS = tuple(part.name for part in fields(BoundGrid))


def check_search(config: Any) -> None:
    """Refuse values of the bound search, and losses and updates that it does not go with."""
    if not 0 < config.positive_contribution_target <= 1:
        raise InputError(
            f"`positive_contribution_target` is {config.positive_contribution_target}: set it to a share in (0, 1] "
            "(odds tau are the share tau / (1 + tau))."
        )
    for name, choices in (
        ("contribution_measure", MEASURES),
        ("contribution_weighting", WEIGHTINGS),
        ("search_order", SEARCH_ORDERS),
        ("search_scope", SCOPES),
        ("loss_type", tuple(LOSSES)),
    ):
        if getattr(config, name) not in choices:
            raise InputError(f"`{name}` is {getattr(config, name)!r}: choose one of {', '.join(map(repr, choices))}.")
    for name in ("epsilon", "epsilon_high"):
        _check_epsilon(config, name)
    _check_unclipped_loss(config)
    _check_weight(config)
    BoundGrid(**{part: getattr(config, f"ratio_{part}") for part in BOUND_PARTS})  # checks the bounds
    if config.has_clip_bounds and config.delta is not None and not config.delta >= config.ratio_upper_max:
        raise InputError(
            f"`delta` is {config.delta}, below `ratio_upper_max`, which is {config.ratio_upper_max}: it would cap "
            "positive tokens before the upper bound does. Raise `delta` to at least that, or unset it."
        )
    default_target = type(config).positive_contribution_target
    moves_share = config.is_adaptive or config.has_constant_weight
    if not moves_share and config.positive_contribution_target != default_target:
        reason = (
            "both clip bounds are fixed" if config.has_clip_bounds else f"`loss_type` {config.loss_type!r} has none"
        )
        raise InputError(
            f"`positive_contribution_target` is {config.positive_contribution_target}, but nothing moves the share: "
            f"{reason}, and `negative_weight_min` is 1. Set `negative_weight_min` below 1, e.g. 0.05, or leave the "
            f"target at {default_target}."
        )
    window, generation = config.gradient_accumulation_steps, config.micro_batches_per_generation
    if config.search_scope != "micro_batch" and config.is_adaptive and generation % window != 0:
        raise InputError(
            f"`search_scope` is {config.search_scope!r}, but an optimizer step of {window} micro-batches "
            f"(`gradient_accumulation_steps`) would span two generations of {generation} micro-batches "
            "(`steps_per_generation` x `num_iterations`), and the second is not sampled yet when the search runs. "
            f"Set `gradient_accumulation_steps` to a divisor of {generation}, make `steps_per_generation` a "
            f"multiple of {window}, or set `search_scope` to 'micro_batch'."
        )


def _check_epsilon(config: Any, name: str) -> None:
    value = getattr(config, name)
    if value is None:
        return
    if config.has_ratio_cap:
        if not (value > 0 and math.isfinite(value)):
            raise InputError(
                f"`{name}` is {value}, the cap on the ratio under '{config.loss_type}': set it above 0, e.g. 5.0."
            )
    elif config.has_clip_bounds:
        raise InputError(
            f"`{name}` is {value}, but it has no effect under BAPO, which searches the clip bounds. Remove it; to fix "
            "both bounds as in GRPO, set `ratio_lower_start` = `ratio_lower_max` (1 - epsilon) and "
            "`ratio_upper_start` = `ratio_upper_max` (1 + epsilon_high)."
        )
    else:
        raise InputError(
            f"`{name}` is {value}, but it has no effect under `loss_type` {config.loss_type!r}: remove it."
        )


def _check_unclipped_loss(config: Any) -> None:
    if config.has_clip_bounds:
        return
    of_bounds = (*(f"ratio_{part}" for part in BOUND_PARTS), "contribution_measure", "contribution_weighting")
    for name in (*of_bounds, "search_order", "delta"):
        if getattr(config, name) != getattr(type(config), name):
            raise InputError(
                f"`{name}` is {getattr(config, name)!r}, but `loss_type` {config.loss_type!r} has no clip bounds: "
                "leave it out, or choose a loss type with bounds "
                f"({', '.join(map(repr, CLIPPED_LOSS_TYPES))})."
            )


def _check_weight(config: Any) -> None:
    if not 0 < config.negative_weight_min <= 1:
        raise InputError(
            f"`negative_weight_min` is {config.negative_weight_min}: set it to a weight in (0, 1], 1 for none."
        )
