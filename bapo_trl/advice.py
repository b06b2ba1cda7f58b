"""Which method to take, as the studies found (docs/stability.md), and how stale the samples of a run get."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from .bapo_config import BAPOConfig


PAGE = "docs/stability.md"
ADVICE: Mapping[str, Any] = MappingProxyType({"loss_type": "vespo"})
"""Fields of `BAPOConfig` to set, on top of the defaults."""


def advice_line(args: BAPOConfig) -> str:
    """Return what the terminal says of the advice at the start of a run with these settings."""
    if all(getattr(args, name) == value for name, value in ADVICE.items()):
        return f"The loss is the one advised ({PAGE})."
    return f"Advice: {', '.join(f'{name} {value}' for name, value in ADVICE.items())} ({PAGE})."


def oldest_age(args: BAPOConfig) -> tuple[float, str]:
    """Return the oldest age at which a sample is trained, in policy versions, and what keeps it so long."""
    if args.uses_replay and args.uses_partial_rollouts:
        limits = (args.replay_max_staleness, args.partial_rollout_max_staleness)
        limit, held_by = None if None in limits else max(limits), " (replay queue and partial rollouts)"
    elif args.uses_replay:
        limit, held_by = args.replay_max_staleness, " (replay queue)"
    elif args.uses_partial_rollouts:
        limit, held_by = args.partial_rollout_max_staleness, " (partial rollouts)"
    else:
        return args.largest_staleness, ""
    return math.inf if limit is None else limit, held_by


def staleness_line(args: BAPOConfig) -> str:
    """Return what a run says at its start: how stale its samples get, and the advice."""
    window = args.gradient_accumulation_steps
    age, held_by = oldest_age(args)
    updates = args.micro_batches_per_generation / window
    oldest = "of any age" if age == math.inf else f"at most {age} policy versions old"
    return (
        f"{updates:g} update{'s' if updates != 1 else ''} a generation, of {window} micro-batch"
        f"{'es' if window != 1 else ''} each; samples {oldest}{held_by}. {advice_line(args)}"
    )
