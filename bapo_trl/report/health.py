"""Health checks of a run: from its logs to findings in words. docs/monitor.md describes each check.

`benchmarks/health_rates.py` measures how well the limits separate good runs of recorded studies from bad ones. A log
is a mean over `logging_steps` updates, so single updates can be worse.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .runs import Logs, Points


ESS_MIN, ESS_OFTEN = 0.3, 0.1  # effective sample size over the number of ratios; below it in this part of the logs
NO_SIGNAL_MAX = 0.7  # of the completions, in groups whose rewards are all equal; DAPO samples these again
CUT_OFF_MAX = 0.5  # of the completions
FALL_MAX, FALL_ERRORS = 1 / 3, 2  # of the best accuracy; and so many standard errors, where they are known
SAME_SHARE = 1e-3  # of the positive contribution, between bounds that make no difference
LATEST_PART = 0.25  # of the logs, that lines on the present state of a run go by
FEWEST_LOGS = 2  # for a verdict: a single one may be noise

Found = str | None  # sentence


@dataclass(frozen=True)
class Finding:
    """A line of the report: its subject, its severity, what was found, why it matters and what to do."""

    name: str
    severity: str  # `warning` or `summary`
    sentence: str
    why: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        severity = "" if self.severity == "summary" else f"{self.severity.capitalize()}: "
        advice = f" {self.why} Try: {self.remedy}" if self.remedy else ""
        return f"{severity}{self.name}: {self.sentence}{advice}"


@dataclass(frozen=True)
class Check:
    """A check that the report makes if its metric was logged."""

    name: str
    metric: str
    find: Callable[[Points, Mapping[str, Any]], Found]  # of at least `FEWEST_LOGS` values, and the facts
    why: str  # it matters
    remedies: Mapping[str, str]  # what to try, and the fact of the run that it needs; none for ""
    needs: str = ""  # fact without which the check is not made
    measure: Callable[[Logs, Mapping[str, Any]], Points] | None = None  # by default the values of the metric


def examine(logs: Logs, facts: Mapping[str, Any], results: Mapping[str, Any] | None = None) -> list[Finding]:
    """
    Return the health of a run: a summary of how many checks passed, then a finding for each check that did not.

    The summary names checks whose metric was not logged, or logged once. Checks that need facts of the run (see
    `facts`) are made if the run has written these facts. `results` are those of its evaluation before and after
    training.
    """
    accuracies = logs.accuracies(results or {})
    starts_at_zero = len(accuracies.steps) > 0 and accuracies.values[0, 0] == 0
    facts = {**facts, "accuracies": accuracies, "at_zero": starts_at_zero, "above_zero": not starts_at_zero}
    checks = [check for check in CHECKS if not check.needs or facts.get(check.needs)]
    points = {each.name: each.measure(logs, facts) if each.measure else logs.points(each.metric) for each in checks}
    made = [check for check in checks if len(points[check.name].steps) >= FEWEST_LOGS]
    findings = []
    for check in made:
        sentence = check.find(points[check.name], facts)
        if sentence is not None:
            remedies = [remedy for remedy, needs in check.remedies.items() if not needs or facts.get(needs)]
            findings.append(Finding(check.name, "warning", sentence, check.why, " ".join(remedies)))
    unchecked = []
    for count, reason in ((0, "not logged"), (1, "logged once, which may be noise")):
        names = [f"`{each.metric}`" for each in checks if len(points[each.name].steps) == count]
        unchecked += [f"Not checked, because {reason}: {', '.join(names)}."] if names else []
    passed = f"{len(made) - len(findings)}/{len(made)} passed." if made else "none could be made."
    return [Finding("Health checks", "summary", " ".join([passed, *unchecked])), *findings]


def _has_reward(logs: Logs, facts: Mapping[str, Any]) -> Points:
    """Return of each log with a generation whether its reward is defined."""
    steps, _ = logs.points("completions/mean_length")
    return Points(steps, np.isin(steps, logs.points("reward").steps))


def _no_reward(points: Points, facts: Mapping[str, Any]) -> Found:
    return None if any(points.values) else f"undefined in all {len(points.steps)} logs."


def _has_fallen(points: Points, facts: Mapping[str, Any]) -> Found:
    """Find the largest fall of the accuracy below its best value so far, as a part of that value."""
    steps, values = points
    best, falls = 0, []
    for place, (accuracy, error) in enumerate(values):
        highest, its_error = values[best]
        if accuracy >= highest:
            best = place
        elif highest - accuracy > FALL_ERRORS * math.hypot(error, its_error):
            falls.append((accuracy / highest, best, place))
    part, high, low = min(falls, default=(math.inf, 0, 0))
    if part > 1 - FALL_MAX + 1e-9:
        return None
    high_text, low_text, last_text = (f"{values[each, 0]:.3f} at update {steps[each]}" for each in (high, low, -1))
    return f"fell from {high_text} to {low_text}{'' if steps[low] == steps[-1] else f'; {last_text}'}."


def _often_below(points: Points, facts: Mapping[str, Any]) -> Found:
    count, total = int((points.values < ESS_MIN).sum()), len(points.values)
    if count < max(FEWEST_LOGS, ESS_OFTEN * total):
        return None
    lowest = points.values.argmin()
    worst = f"{points.values[lowest]:.3g} at update {points.steps[lowest]}"
    return f"below {ESS_MIN:g} of the samples in {count} of {total} logs; lowest {worst}."


def _bounds_change_nothing(logs: Logs, facts: Mapping[str, Any]) -> Points:
    """Return of each log whether the bounds left the positive contribution, and all ratios lie within their start."""
    lower, upper = facts["start_bounds"]
    names = ("bapo/positive_share", "bapo/positive_share_initial", "ratio/min", "ratio/max")
    logged = [dict(zip(*(part.tolist() for part in logs.points(name)), strict=True)) for name in names]
    steps = sorted(set.intersection(*map(set, logged)))
    changes = [
        abs(share - initial) > SAME_SHARE or smallest < lower or largest > upper
        for share, initial, smallest, largest in ([each[step] for each in logged] for step in steps)
    ]
    return Points(np.array(steps, int), ~np.array(changes, bool))


def _without_effect(points: Points, facts: Mapping[str, Any]) -> Found:
    if not all(points.values):
        return None
    lower, upper = facts["start_bounds"]
    return f"none in {len(points.steps)} of {len(points.steps)} logs: all ratios lie within {lower:g} to {upper:g}."


def _no_signal(points: Points, facts: Mapping[str, Any]) -> Found:
    found = _in_the_latest(points, NO_SIGNAL_MAX, "are in groups whose rewards are all equal")
    return f"{found[:-1]}; the first evaluation is 0." if found and facts["at_zero"] else found


def _cut_off(points: Points, facts: Mapping[str, Any]) -> Found:
    return _in_the_latest(points, CUT_OFF_MAX, "reached the maximum length")


def _in_the_latest(points: Points, largest: float, what: str) -> Found:
    """Find a mean of the latest logs above a limit."""
    total = len(points.values)
    latest = points.values[-max(FEWEST_LOGS, math.ceil(LATEST_PART * total)) :]
    mean = math.fsum(latest) / len(latest)
    return (
        f"{mean:.0%} of the completions {what}, in the latest {len(latest)} of {total} logs."
        if mean > largest
        else None
    )


CHECKS = (
    Check(
        "No reward",
        "reward",
        _no_reward,
        "No reward function returned a number, so nothing is trained.",
        {"A reward function that returns a number for each sample it applies to.": ""},
        measure=_has_reward,
    ),
    Check(
        "Accuracy fell",
        "eval_reward",
        _has_fallen,
        "The policy lost a third or more of what it had learned.",
        {"A lower `learning_rate`, or a checkpoint saved before the fall.": ""},
        measure=lambda logs, facts: facts["accuracies"],
    ),
    Check(
        "Effective sample size",
        "ratio/ess",
        _often_below,
        "A few tokens with large ratios dominate the update, which makes it noisy.",
        {
            "Compare log-probabilities of vLLM and the trainer (`sampling/` metrics).": "uses_vllm",
            "Fewer updates per generation.": "can_be_fresher",
            "A lower `learning_rate`.": "",
        },
        needs="has_clip_bounds",  # good runs with VESPO, which weighs such tokens down, have it as well
    ),
    Check(
        "Effect of the clip bounds",
        "bapo/positive_share_initial",
        _without_effect,
        "The policy hardly moves between sampling and training, so BAPO does nothing.",
        {"If it should, more updates per generation, or a larger `learning_rate`.": ""},
        needs="start_bounds",
        measure=_bounds_change_nothing,
    ),
    Check(
        "Zero-advantage groups",
        "frac_reward_zero_std",
        _no_signal,
        "Completions with advantage 0 train nothing.",
        {
            "Check the reward on a right answer. Easier prompts, or a reward for parts of an answer.": "at_zero",
            "Prompts of medium difficulty, a larger `num_generations`, or a finer reward.": "above_zero",
            "`replay_zero_advantage`, which trains on buffered samples instead.": "can_refill",
        },
    ),
    Check(
        "Completions cut off",
        "completions/clipped_ratio",
        _cut_off,
        "The reward then measures length more than content.",
        {
            "A larger `max_completion_length`, or a prompt that asks for a shorter answer.": "",
            "Check the end-of-sequence token.": "",
            "`mask_truncated_completions`.": "can_mask_truncated",
        },
    ),
)
"""All health checks, in the order in which they are reported."""
