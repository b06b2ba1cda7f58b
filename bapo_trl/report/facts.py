"""What a run was, in facts that it writes when it begins: the report and `compare` read them without its settings."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Facts:
    """The facts of a run; where they are not known, nothing is claimed or advised that needs one."""

    method: str = ""  # `BAPO`, `VESPO`, `GRPO bounds` and the like
    limits: Mapping[str, float] = field(default_factory=dict)  # ends of the bounds that are searched, by metric
    searches_weight: bool = False  # of negative tokens, for each update
    target: float | None = None  # `positive_contribution_target`, where anything is searched for it
    can_weigh: bool = False  # `negative_weight_min` could be set, and is not
    can_refill: bool = False  # so `replay_zero_advantage`
    has_queue: bool = False
    has_stale_samples: bool = False  # without a queue as well
    uses_vllm: bool = False
    is_tempered: bool = False  # samples at another `temperature` than 1
    can_mask_truncated: bool = False  # `mask_truncated_completions` could be set, and is not
    rows_per_generation: int | None = None  # of all processes

    @property
    def has_target(self) -> bool:
        """Whether anything is searched for `positive_contribution_target`."""
        return self.target is not None

    @property
    def searches_lower(self) -> bool:
        """Whether the lower bound is searched."""
        return "bapo/clip_low" in self.limits

    @property
    def searches_upper(self) -> bool:
        """Whether the upper bound is searched."""
        return "bapo/clip_high" in self.limits

    @property
    def searches_lower_alone(self) -> bool:
        """Whether the lower bound is the only one that is searched."""
        return self.searches_lower and not self.searches_upper

    @property
    def can_raise_target(self) -> bool:
        """Whether a higher target would let more positive tokens through."""
        return self.searches_upper and self.target != 1

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


def facts_in(settings: Mapping[str, Any]) -> Facts:
    """Return the facts that a run has written among its settings, if any."""
    known = {each.name for each in fields(Facts)}
    return Facts(**{name: value for name, value in settings.get("facts", {}).items() if name in known})


def facts_of(args: Any) -> Facts:
    """Return the facts of a run by its [`BAPOConfig`]."""
    ends = {"bapo/clip_low": args.bound_grid.lower, "bapo/clip_high": args.bound_grid.upper}
    searched = {metric: bounds for metric, bounds in ends.items() if len(bounds) > 1}
    if args.is_always_on_policy:
        searched = {}  # without an effect
    searches_weight = args.negative_weight_min < 1 and not args.has_constant_weight
    return Facts(
        method=method_name(args),
        limits={metric: round(bounds[-1].item(), 9) for metric, bounds in searched.items()},
        searches_weight=searches_weight,
        target=args.positive_contribution_target if searched or searches_weight else None,
        can_weigh=args.negative_weight_min == 1,
        can_refill=not args.replay_zero_advantage,
        has_queue=args.uses_replay,
        has_stale_samples=args.largest_staleness > 0 or args.uses_partial_rollouts,
        uses_vllm=args.use_vllm,
        is_tempered=args.temperature != 1,
        can_mask_truncated=not args.mask_truncated_completions,
        rows_per_generation=args.generation_batch_size,
    )


def method_name(args: Any) -> str:
    """Return what the method of a [`BAPOConfig`] is called."""
    is_of_sequences = args.importance_sampling_level == "sequence"
    bounds = args.ratio_lower_start, args.ratio_upper_start
    between = f"bounds {bounds[0]:g} to {bounds[1]:g}"
    if not args.has_clip_bounds:
        name = args.loss_type.upper()
    elif not args.bound_grid.is_fixed:
        name = "BAPO, ratios of sequences" if is_of_sequences else "BAPO"
    elif is_of_sequences:
        name = f"GSPO, {between}"
    else:
        is_grpo = all(map(math.isclose, bounds, (0.8, 1.2)))
        name = "GRPO bounds" if is_grpo else f"Fixed {between}"
    if args.negative_weight_min < 1:
        kind = "constant weight" if args.has_constant_weight else "weight from"
        name += f", {kind} {args.negative_weight_min:g}"
    return name
