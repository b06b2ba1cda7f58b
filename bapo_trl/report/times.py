"""Where the time of a run went, and the most that a setting could save of it, from its `time/*` metrics alone."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from .runs import Logs


PHASES = ("generation", "weights", "scoring", "rewards", "training", "waiting", "other")
"""Phases of an update, those of `phase_clock`, which imports torch."""


def seconds_of(logs: Logs) -> dict[str, float]:
    """Return the seconds of each phase in the updates that were logged; empty without `time/*` metrics."""
    seconds = {}
    updates = dict(zip(logs.steps, np.diff(logs.steps, prepend=0), strict=True))  # of each log line
    for name in PHASES:
        steps, values = logs.points(f"time/{name}")
        if len(steps):
            seconds[name] = float(sum(updates[step] * value for step, value in zip(steps, values, strict=True)))
    return seconds


def largest_savings(seconds: Mapping[str, float], facts: Mapping[str, Any]) -> dict[str, float]:
    """Return the most seconds that each setting could save, the largest first."""
    generation = seconds["generation"]
    savings = {}
    if facts.get("can_overlap"):
        savings["overlap_generation"] = min(generation, sum(seconds.values()) - generation)
    if facts.get("can_use_sampler_logps"):
        savings["use_sampler_logps"] = seconds["scoring"]
    return dict(sorted(savings.items(), key=lambda pair: -pair[1]))


def time_line(logs: Logs, facts: Mapping[str, Any]) -> str:
    """Return where the time went, as text; empty without `time/*` metrics."""
    seconds = seconds_of(logs)
    total = sum(seconds.values())
    if not total:
        return ""
    largest = sorted(seconds.items(), key=lambda pair: -pair[1])
    parts = ", ".join(f"{name} {part / total:.0%}" for name, part in largest if part / total >= 0.005)
    line = f"Time: {logs.steps[-1]} updates took {total:,.0f} s, without evaluations and saves: {parts}."
    savings = largest_savings(seconds, facts)
    if savings:
        saved = ", ".join(f"{name} {part / total:.0%}" for name, part in savings.items())
        line += f" The most that a setting could save: {saved}."
    return line
