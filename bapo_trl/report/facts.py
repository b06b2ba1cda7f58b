"""Facts that follow from the settings of a run. The run writes them once; the report and `compare` read them."""

import math
from typing import Any


def facts_of(args: Any) -> dict[str, Any]:
    """
    Return the facts of a run by its [`BAPOConfig`]: numbers that its logs are measured against, and what the health
    lines may advise. Of a run without facts, as of TRL's trainer, nothing is claimed that needs one.
    """
    ends = {"bapo/clip_low": args.bound_grid.lower, "bapo/clip_high": args.bound_grid.upper}
    limits = {metric: round(bounds[-1].item(), 9) for metric, bounds in ends.items() if len(bounds) > 1}
    if args.is_always_on_policy:
        limits = {}  # the search has no effect, as the run says at its start
    starts = [round(bounds[0].item(), 9) for bounds in ends.values()] if limits else None
    searches_weight = args.negative_weight_min < 1 and not args.has_constant_weight
    has_stale_samples = args.largest_staleness > 0 or args.uses_partial_rollouts
    return {
        "method": method_name(args),
        "limits": limits,  # ends of the bounds that are searched
        "start_bounds": starts,  # of adaptive bounds
        "target": args.positive_contribution_target if limits or searches_weight else None,
        "has_clip_bounds": args.has_clip_bounds,
        "rows_per_generation": args.generation_batch_size,
        "can_be_fresher": has_stale_samples or args.uses_replay,
        "can_refill": not args.replay_zero_advantage,
        "uses_vllm": args.use_vllm,
        "can_overlap": args.use_vllm and args.vllm_mode == "server" and not args.overlap_generation,
        "can_carry_over": not (args.uses_partial_rollouts or args.overlap_generation),
        "can_use_sampler_logps": args.use_vllm and not args.takes_sampler_logps,
        "can_mask_truncated": not args.mask_truncated_completions,
    }


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
