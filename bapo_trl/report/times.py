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


def largest_savings(logs: Logs, facts: Mapping[str, Any]) -> dict[str, float]:
    """Return the most seconds that each setting could save, the largest first."""
    seconds = seconds_of(logs)
    generation = seconds["generation"]
    metrics = ("frac_reward_zero_std", "completions/mean_length", "completions/max_length")
    logged = [logs.points(name).values for name in metrics]
    zero_advantage, length, longest = (float(np.mean(values)) if len(values) else 0.0 for values in logged)
    savings = {}
    if facts.get("can_carry_over") and longest:  # the wait for the longest completions
        savings["partial_rollout_oversampling"] = generation * (1 - length / longest)
    if facts.get("can_refill"):  # the generation of what is not trained on
        savings["replay_zero_advantage"] = generation * zero_advantage
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
    savings = largest_savings(logs, facts).items()
    saved = ", ".join(f"{name} {part / total:.0%}" for name, part in savings if part / total >= 0.005)
    return f"{line} The most that a setting could save: {saved}." if saved else line
