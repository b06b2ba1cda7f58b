"""The settings of the bound search, which every trainer has that searches clip bounds."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .curves import MEASURES
from .grid import BOUND_PARTS, BoundGrid
from .search import SCOPES, SEARCH_ORDERS
from .tokens import WEIGHTINGS


class _Metadata(dict):
    """Metadata of a field that has a `range`: not for argparse, to which the parsers of transformers give a copy."""

    def copy(self) -> dict:
        return {key: value for key, value in self.items() if key != "range"}


def setting(default: Any, allowed: str | Sequence[str], text: str) -> Any:
    """Declare a field with what it may be, an interval such as "(0, 1]" or choices, and its help text."""
    if isinstance(allowed, str):
        return field(default=default, metadata=_Metadata(help=text, range=allowed))
    return field(default=default, metadata={"help": text, "choices": list(allowed)})


@dataclass
class BoundSearchConfig:
    """Fields of the bound search, for the configuration class of a trainer."""

    positive_contribution_target: float = setting(
        0.5,
        "(0, 1]",
        "Share of the policy loss that positive-advantage tokens are to contribute, in (0, 1]. An odds target "
        "`tau` (positive over negative) is the share `tau / (1 + tau)`.",
    )
    ratio_lower_start: float = setting(0.6, "(0, 1]", "Lower clip bound at which each search starts, in ratio space.")
    ratio_lower_max: float = setting(
        0.9, "(0, 1]", "Highest lower clip bound. Equal to `ratio_lower_start`, the lower bound is fixed."
    )
    ratio_lower_step: float = setting(0.02, "(0, inf)", "Step of the lower clip bound.")
    ratio_upper_start: float = setting(
        1.2, "[1, inf)", "Upper clip bound at which each search starts, in ratio space."
    )
    ratio_upper_max: float = setting(
        3.0, "[1, inf)", "Highest upper clip bound. Equal to `ratio_upper_start`, the upper bound is fixed."
    )
    ratio_upper_step: float = setting(0.05, "(0, inf)", "Step of the upper clip bound.")
    contribution_measure: str = setting(
        "gradient",
        MEASURES,
        "What a token contributes, `gradient`, its part in the gradient if the clip lets it through, or "
        "`surrogate`, the value of its clipped term.",
    )
    contribution_weighting: str = setting(
        "uniform",
        WEIGHTINGS,
        "Weight of a token in the share, `uniform`, or `behavior_prob`, its probability under the policy that "
        "sampled it, as Eq. 8 prints it.",
    )
    search_order: str = setting(
        "upper_first", SEARCH_ORDERS, "Which bound moves first, `upper_first` or `lower_first`."
    )
    search_scope: str = setting(
        "carried_over",
        SCOPES,
        "Tokens of one search, on all ranks: `batch`, as published, all micro-batches of the optimizer step, free "
        "with one, with an extra forward pass if there are several; `carried_over`, a forecast of these from the "
        "update before; or `micro_batch`, the current micro-batch.",
    )
    negative_weight_min: float = setting(
        1.0,
        "(0, 1]",
        "Smallest weight of negative-advantage tokens in the policy loss, in (0, 1]. Where the bounds miss "
        "`positive_contribution_target`, these tokens are weighed down to reach it. With 1 there is no weight, as "
        "in the paper. With fixed bounds, or none, and a target of 1, it is the weight in every update and needs "
        "no extra forward pass.",
    )

    @property
    def bound_grid(self) -> BoundGrid:
        """Candidate clip bounds of the search."""
        return BoundGrid(**{part: getattr(self, f"ratio_{part}") for part in BOUND_PARTS})

    @property
    def is_adaptive(self) -> bool:
        """Whether anything of the loss is chosen for each update: a bound, or the weight of negative tokens."""
        has_weight = self.negative_weight_min < 1 and not self.has_constant_weight
        return not self.bound_grid.is_fixed or has_weight

    @property
    def has_constant_weight(self) -> bool:
        """Whether negative tokens have their smallest weight in every update: a share of 1 is out of reach."""
        never_met = self.positive_contribution_target == 1 and self.bound_grid.is_fixed
        return never_met and self.negative_weight_min < 1
