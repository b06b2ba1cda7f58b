"""Which settings for which staleness: what the study of the balance found (docs/stability.md)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..bapo_config import BAPOConfig


PAGE = "docs/stability.md"


@dataclass(frozen=True)
class Advice:
    """
    A row of the advice: for which runs, and what to set.

    Attributes:
        name (`str`):
            What the row calls the samples.
        oldest (`float`):
            Oldest age of a sample that the row is for, in policy versions.
        updates (`str`):
            The same as optimizer updates per generation, with those that were measured.
        share (`str`):
            Shares of positive tokens at the start that it is for.
        settings (mapping of `str` to values):
            Fields of [`BAPOConfig`], on top of the defaults.
    """

    name: str
    oldest: float
    updates: str
    share: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def line(self, args: BAPOConfig) -> str:
        """Return what the terminal says of it at the start of a run with these settings."""
        what = ", ".join(f"{name} {value}" for name, value in self.settings.items()) or "the defaults will do"
        if self.settings and all(getattr(args, name) == value for name, value in self.settings.items()):
            what = "set as advised"
        return f"{self.name}: {what} ({PAGE})"


ADVICE = (
    Advice("samples hardly stale", 7, "up to 8 (measured: 1 and 4)", "any"),
    Advice(
        "stale samples",
        math.inf,
        "more (measured: 16, 64 and 256)",
        "0.3 to 0.7 (measured)",
        {"loss_type": "vespo", "positive_contribution_target": 1.0, "negative_weight_min": 0.5},
    ),
)


def advice_for(oldest_age: float) -> Advice:
    """Return the row for samples that get as old as this, in policy versions."""
    return next(advice for advice in ADVICE if oldest_age <= advice.oldest)


def advice_table() -> str:
    """Return the advice as a table in Markdown."""
    lines = ["| samples | updates per generation | share of positives at the start | settings |", "|---|---|---|---|"]
    for advice in ADVICE:
        settings = ", ".join(f"`{name}={value!r}`" for name, value in advice.settings.items()) or "the defaults"
        lines.append(f"| {advice.name} | {advice.updates} | {advice.share} | {settings} |")
    return "\n".join(lines)
