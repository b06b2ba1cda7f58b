"""Settings of the clip bound search, shared by all trainers that search for clip bounds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .curves import MEASURES
from .grid import BOUND_PARTS, BoundGrid
from .search import SCOPES, SEARCH_ORDERS
from .tokens import WEIGHTINGS


class _Metadata(dict):
    """Metadata of a field with a `range`. The copy that transformers passes to argparse has the range in its help."""

    def copy(self) -> dict:
        return {"help": help_of(self)}


def help_of(metadata: Mapping[str, Any]) -> str:
    """Return the help text of a field, with its range if it has one."""
    return metadata["help"] + (f" Range: {metadata['range']}." if "range" in metadata else "")


def setting(default: Any, allowed: str | Sequence[str], text: str) -> Any:
    """Declare a field with its range, such as "(0, 1]", or its choices, and its help text."""
    if isinstance(allowed, str):
        return field(default=default, metadata=_Metadata(help=text, range=allowed))
    return field(default=default, metadata={"help": text, "choices": list(allowed)})


@dataclass
class BoundSearchConfig:
    """Settings of the clip bound search, for the configuration class of a trainer to inherit from."""

    positive_contribution_target: float = setting(
        0.5,
        "(0, 1]",
        "Target fraction of the policy loss that should come from positive-advantage tokens. If your target is an "
        "odds ratio `tau` (positive over negative), set `tau / (1 + tau)`.",
    )
    ratio_lower_start: float = setting(
        0.6, "(0, 1]", "Lower clip bound at which each search starts, as an importance ratio."
    )
    ratio_lower_max: float = setting(
        0.9,
        "(0, 1]",
        "Highest lower clip bound that the search may choose. Set it equal to `ratio_lower_start` to fix the lower "
        "bound.",
    )
    ratio_lower_step: float = setting(0.02, "(0, inf)", "Step by which the search raises the lower clip bound.")
    ratio_upper_start: float = setting(
        1.2, "[1, inf)", "Upper clip bound at which each search starts, as an importance ratio."
    )
    ratio_upper_max: float = setting(
        3.0,
        "[1, inf)",
        "Highest upper clip bound that the search may choose. Set it equal to `ratio_upper_start` to fix the upper "
        "bound.",
    )
    ratio_upper_step: float = setting(0.05, "(0, inf)", "Step by which the search raises the upper clip bound.")
    contribution_measure: str = setting(
        "gradient",
        MEASURES,
        "How the contribution of a token to the loss is measured. `gradient`: the size of its gradient, 0 if the "
        "token is clipped. `surrogate`: the value of its clipped objective, counted even if the token is clipped.",
    )
    contribution_weighting: str = setting(
        "uniform",
        WEIGHTINGS,
        "Weight of each token's contribution. `uniform`: all tokens count alike. `behavior_prob`: the probability of "
        "the token under the policy that sampled it, as printed in Eq. 8 of the paper.",
    )
    search_order: str = setting(
        "upper_first",
        SEARCH_ORDERS,
        "Which bound the search moves to its maximum before it moves the other: `upper_first` or `lower_first`.",
    )
    search_scope: str = setting(
        "carried_over",
        SCOPES,
        "Which tokens the clip bounds are computed from, across all ranks. `carried_over`: an estimate from the "
        "previous update, at almost no extra cost. `batch`: all micro-batches of the current update, as in the "
        "paper; needs an extra forward pass if there is more than one micro-batch. `micro_batch`: each micro-batch "
        "gets its own bounds.",
    )
    negative_weight_min: float = setting(
        1.0,
        "(0, 1]",
        "How far the loss of negative-advantage tokens may be scaled down when the bounds alone miss "
        "`positive_contribution_target`: the smallest weight. 1: never, as in the paper.",
    )

    @property
    def bound_grid(self) -> BoundGrid:
        """Candidate clip bounds that the search chooses from."""
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
