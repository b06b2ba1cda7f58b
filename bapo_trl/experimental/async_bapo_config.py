"""Configuration of `AsyncBAPOTrainer`: TRL's `AsyncGRPOConfig` plus the settings of the bound search."""

from dataclasses import dataclass, field, fields
from typing import get_args

from trl.experimental.async_grpo import AsyncGRPOConfig

from ..clip_bounds.config import BoundSearchConfig, setting
from ..inputs.setting_checks import check_fields
from ..inputs.setting_rules import check_bounds, check_epsilons


@dataclass
class AsyncBAPOConfig(BoundSearchConfig, AsyncGRPOConfig):
    """
    Configuration of [`experimental.AsyncBAPOTrainer`].

    Takes all parameters of TRL's `AsyncGRPOConfig`, and the parameters of [`BAPOConfig`] for the bound search, from
    `positive_contribution_target` to `search_scope`, with these differences:

    - Leave `epsilon` and `epsilon_high` unset: BAPO chooses the clip bounds.
    - `search_scope` is `"carried_over"`, which estimates the bounds of every update from the previous one, or
      `"micro_batch"`, which is exact for the tokens of a micro-batch on all ranks. With one micro-batch per update,
      `"micro_batch"` is the search of the paper.
    - `negative_weight_min` must be 1: TRL's loss uses the advantages before the log-probabilities are known.

    Raises:
        ValueError: If a value is out of range or conflicts with another one.
    """

    has_clip_bounds = True  # no field: TRL's loss clips ratios
    has_ratio_cap = False
    delta = None  # nor a cap on those of negative tokens

    epsilon: float | None = field(
        default=None, metadata={"help": "Not used: BAPO chooses the clip bounds. See `ratio_lower_start`."}
    )
    epsilon_high: float | None = field(
        default=None, metadata={"help": "Not used: BAPO chooses the clip bounds. See `ratio_upper_start`."}
    )
    search_scope: str = setting(
        "carried_over",
        ("carried_over", "micro_batch"),
        "Which tokens the clip bounds are computed from, across all ranks. `carried_over`: an estimate from the "
        "previous update. `micro_batch`: each micro-batch gets its own bounds.",
    )
    negative_weight_min: float = setting(
        1.0, "[1, 1]", "Must be 1: the asynchronous trainer cannot scale the loss of negative-advantage tokens."
    )

    def __post_init__(self):
        super().__post_init__()
        names = {f.name for f in fields(BoundSearchConfig)}
        own = [f for f in fields(self) if f.name in names]
        check_fields(self, own, {f.name: get_args(f.type) or (f.type,) for f in own})
        check_epsilons(self)
        check_bounds(self)
