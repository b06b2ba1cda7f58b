"""How stale the samples of a run get under its settings, a `BAPOConfig`. Staleness is in policy versions."""

import math
from typing import Any


def staleness_limit(args: Any) -> str:
    """Return the largest staleness of a trained sample, and the features that cause it, as text for a table."""
    limit, cause = _limit_and_cause(args)
    return ("no limit" if limit is None else f"{limit} policy versions") + cause


def staleness_line(args: Any) -> str:
    """Return the line that a run prints at its start about the staleness of its samples."""
    limit, cause = _limit_and_cause(args)
    window = args.gradient_accumulation_steps
    updates = args.micro_batches_per_generation / window
    oldest = "of any staleness" if limit is None else f"at most {limit} policy versions old"
    return (
        f"{updates:g} update{'s' if updates != 1 else ''} per generation, of {window} micro-batch"
        f"{'es' if window != 1 else ''} each; samples {oldest}{cause}."
    )


def mean_staleness(args: Any) -> float:
    """
    Return the mean staleness of fresh samples when they are trained on, in policy versions.

    The staleness of a micro-batch is the number of updates since it was generated. Generation steps may begin within
    an update, so the mean is taken over as many steps as it takes to begin at the same position again.
    """
    generation, window = args.micro_batches_per_generation, args.gradient_accumulation_steps
    cycle = math.lcm(generation, window)
    lead = generation if args.overlap_generation else 0  # from the request to the first training
    staleness = [(place + lead) // window - place // generation * generation // window for place in range(cycle)]
    return sum(staleness) / cycle


def _limit_and_cause(args: Any) -> tuple[int | None, str]:
    """Return the largest staleness, `None` for no limit, and the features that raise it, in brackets."""
    limits = {}
    if args.uses_replay:
        limits["replay buffer"] = args.replay_max_staleness
    if args.uses_partial_rollouts:
        limits["partial rollouts"] = args.partial_rollout_max_staleness
    if not limits:
        return args.largest_staleness, ""
    limit = None if None in limits.values() else max(limits.values())
    return limit, f" ({' and '.join(limits)})"
