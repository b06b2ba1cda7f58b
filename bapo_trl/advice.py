"""Which settings for which staleness: what the study of the balance found (docs/stability.md)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .bapo_config import BAPOConfig


PAGE = "docs/stability.md"
DEFAULTS = f"the defaults (`search_scope={BAPOConfig.search_scope!r}`)"


@dataclass(frozen=True)
class Advice:
    """A row of the advice: for which runs, and what to set."""

    name: str  # of the samples
    oldest: float  # age of a sample that the row is for, in policy versions
    updates: str  # the same as optimizer updates per generation, with those that were measured
    settings: Mapping[str, Any] = field(default_factory=dict)  # fields of `BAPOConfig`, on top of the defaults
    evidence: str = ""  # how sure: difference, seeds, tasks

    def line(self, args: BAPOConfig) -> str:
        """Return what the terminal says of it at the start of a run with these settings."""
        what = ", ".join(f"{name} {value}" for name, value in self.settings.items()) or "the defaults will do"
        if self.settings and all(getattr(args, name) == value for name, value in self.settings.items()):
            what = "set as advised"
        return f"{self.name[0].upper()}{self.name[1:]}: {what} ({PAGE})."


ADVICE = (
    Advice(
        "samples hardly stale",
        3,
        "up to 4 (measured: 1 and 4)",
        evidence="GRPO, clip-higher and BAPO end within 0.001 of one another, 5 seeds, hard task",
    ),
    Advice(
        "stale samples",
        math.inf,
        "more (measured: 16, 64 and 256; 8 in VESPO's paper)",
        {"loss_type": "vespo", "positive_contribution_target": 1.0, "negative_weight_min": 0.5},
        "above GRPO by 0.14 and 0.55 on the hard task, level with TRL's VESPO or above it (+0.047 ± 0.021 at 256, "
        "easy task), 3 seeds; on a chat model VESPO is above GRPO (0.105 ± 0.038, 3 seeds), half the weight is open",
    ),
)


def advice_for(oldest_age: float) -> Advice:
    """Return the row for samples that get as old as this, in policy versions."""
    return next(advice for advice in ADVICE if oldest_age <= advice.oldest)


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
    """Return what a run says at its start: how stale its samples get, and the row of the advice for that."""
    window = args.gradient_accumulation_steps
    age, held_by = oldest_age(args)
    updates = args.micro_batches_per_generation / window
    oldest = "of any age" if age == math.inf else f"at most {age} policy versions old"
    return (
        f"{updates:g} update{'s' if updates != 1 else ''} a generation, of {window} micro-batch"
        f"{'es' if window != 1 else ''} each; samples {oldest}{held_by}. {advice_for(age).line(args)}"
    )


def advice_table() -> str:
    """Return the advice as a table in Markdown."""
    lines = ["| samples | updates per generation | settings | how sure |", "|---|---|---|---|"]
    for advice in ADVICE:
        settings = ", ".join(f"`{name}={value!r}`" for name, value in advice.settings.items()) or DEFAULTS
        lines.append(f"| {advice.name} | {advice.updates} | {settings} | {advice.evidence} |")
    return "\n".join(lines)
