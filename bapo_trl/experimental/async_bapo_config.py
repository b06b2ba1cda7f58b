"""Configuration of `AsyncBAPOTrainer`: TRL's `AsyncGRPOConfig` with the settings of the bound search."""

from dataclasses import dataclass, field, fields
from typing import get_args

from ..clip_bounds.config import BoundSearchConfig
from ..config_rules import check_bounds, check_epsilons
from ..errors import InputError
from ..inputs.setting_checks import check_fields
from .async_grpo_compat import AsyncGRPOConfig


@dataclass
class AsyncBAPOConfig(BoundSearchConfig, AsyncGRPOConfig):
    """
    Configuration class for [`experimental.AsyncBAPOTrainer`].

    Takes all parameters of TRL's `AsyncGRPOConfig`, and those of the bound search of [`BAPOConfig`], from
    `positive_contribution_target` to `search_scope`, with these differences:

    - `epsilon` and `epsilon_high` must be left alone: the search chooses the clip bounds.
    - `search_scope` is `"carried_over"`, where all updates are forecast, or `"micro_batch"`, which is exact for the
      tokens of a micro-batch and sums them over ranks within its loss. With one micro-batch an update, that is the
      published search.
    - `negative_weight_min` is 1: TRL's loss reads the advantages before the log-probabilities are known.

    Raises:
        ValueError: If a value is out of its range or does not go with another.
    """

    has_clip_bounds = True  # no field: TRL's loss clips ratios
    has_ratio_cap = False
    delta = None  # nor a cap on those of negative tokens

    epsilon: float | None = field(
        default=None, metadata={"help": "Not used: BAPO searches the clip bounds. See `ratio_lower_start`."}
    )
    epsilon_high: float | None = field(
        default=None, metadata={"help": "Not used: BAPO searches the clip bounds. See `ratio_upper_start`."}
    )

    def __post_init__(self):
        super().__post_init__()
        own = fields(BoundSearchConfig)
        check_fields(self, own, {f.name: get_args(f.type) or (f.type,) for f in own})
        check_epsilons(self)
        if self.search_scope == "batch":
            raise InputError(
                "`search_scope` is 'batch', for which an update's tokens are scored before its losses: the "
                "asynchronous trainer does not. Choose 'carried_over' or 'micro_batch'."
            )
        if self.negative_weight_min != 1:
            raise InputError(
                f"`negative_weight_min` is {self.negative_weight_min}, but the asynchronous trainer's loss reads the "
                "advantages before the weight is known: leave it at 1."
            )
        check_bounds(self)
