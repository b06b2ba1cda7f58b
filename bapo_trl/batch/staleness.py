"""How stale the samples of a run get under its settings, a `BAPOConfig`. Staleness is in policy versions."""

from statistics import fmean
from typing import Any


def max_staleness_in_words(args: Any) -> str:
    """Return the maximum staleness of a sample in training, and what carries samples over, in words for a table."""
    staleness, sources = _max_staleness(args)
    return ("no limit" if staleness is None else f"{staleness} policy versions") + sources


def updates_per_generation(args: Any) -> float:
    """Return the updates on the samples of a generation, not rounded."""
    return args.micro_batches_per_generation / args.gradient_accumulation_steps


def staleness_line(args: Any) -> str:
    """Return the line that a run prints at its start: updates per generation and maximum staleness."""
    staleness, sources = _max_staleness(args)
    updates = updates_per_generation(args)
    kind = "On-policy" if staleness == 0 else "Off-policy"
    limit = "no staleness limit" if staleness is None else f"max staleness {staleness}"
    effect = ", so clip bounds have no effect" if staleness == 0 and args.has_clip_bounds else ""
    return f"{kind}: {updates:g} update{'s' * (updates != 1)} per generation ({limit}{sources}){effect}."


def mean_staleness(args: Any) -> float:
    """Return the mean staleness of fresh samples when they are trained on, in policy versions."""
    return fmean(args.fresh_staleness)


def _max_staleness(args: Any) -> tuple[int | None, str]:
    """Return the maximum staleness, `None` for no limit, and what carries samples over to later generations."""
    limits = {}
    if args.uses_replay:
        limits["replay buffer"] = args.replay_max_staleness
    if args.uses_partial_rollouts:
        limits["partial rollouts"] = args.partial_rollout_max_staleness
    if not limits:
        return args.largest_staleness, ""
    staleness = None if None in limits.values() else max(limits.values())
    return staleness, f", with {' and '.join(limits)}"
