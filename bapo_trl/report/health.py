"""Health checks of a run: from its logs to findings in words. docs/monitor.md describes each check.

The thresholds of `ratio/mean`, `ratio/ess` and `ratio/chi2` are those of verl's documentation on rollout correction
(`docs/algo/rollout_corr.md`). The others are rules of thumb: beyond them, most of a batch trains nothing useful. A log
is a mean over `logging_steps` updates, so single updates can be worse.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .runs import Logs, Points


RATIO_MEAN_MIN, RATIO_MEAN_MAX = 0.5, 2.0  # of the importance ratio
ESS_MIN = 0.3  # effective sample size over the number of ratios
CHI2_MAX = 1.0
TARGET_MISSED_MAX = 0.5  # of the updates
ENTROPY_FACTOR, ENTROPY_UPDATES = 0.5, 50  # it falls to this part of itself within so many
NO_SIGNAL_MAX = 0.7  # of the completions, in groups whose rewards are all equal; DAPO samples these again
CUT_OFF_MAX = 0.5  # of the completions
AT_LIMIT_MAX, LATE_PART = 0.6, 1 / 3  # of the logs with a search, in this part of them, the latest
MASKED_MAX = 0.5  # of the rows of an update
LATEST_PART = 0.25  # of the logs, that lines on the present state of a run go by
OFTEN = 0.1  # from this part of the logs on, a line on single logs is a warning; below, a note
FEWEST_LOGS = 2  # for a verdict, and for a warning: a single one may be noise

Found = tuple[str, str] | None  # severity and sentence


@dataclass(frozen=True)
class Finding:
    """A line of the report: its subject, its severity, what was found, why it matters and what to do."""

    name: str
    severity: str  # `warning`, `note` or `summary`
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
    find: Callable[[Points], Found]  # of at least `FEWEST_LOGS` values
    why: str  # it matters
    remedies: Mapping[str, str]  # what to try, and the fact of the run that it needs; none for ""
    needs: str = ""  # fact without which the check is not made
    measure: Callable[[Logs, Mapping], Points] | None = None  # what it goes by; by default the values of the metric


def examine(logs: Logs, facts: Mapping[str, Any]) -> list[Finding]:
    """
    Return the health of a run: a summary of how many checks passed, then a finding for each check that did not.

    The summary names checks whose metric was not logged, or logged once. Checks that need facts of the run (see
    `facts`) are made if the run has written these facts.
    """
    checks = [check for check in CHECKS if not check.needs or facts.get(check.needs)]
    points = {each.name: each.measure(logs, facts) if each.measure else logs.points(each.metric) for each in checks}
    made = [check for check in checks if len(points[check.name].steps) >= FEWEST_LOGS]
    findings = []
    for check in made:
        found = check.find(points[check.name])
        if found is not None:
            remedies = [sentence for sentence, needs in check.remedies.items() if not needs or facts.get(needs)]
            findings.append(Finding(check.name, *found, check.why, " ".join(remedies)))
    unchecked = []
    for count, reason in ((0, "not logged"), (1, "logged once, which may be noise")):
        names = [f"`{each.metric}`" for each in checks if len(points[each.name].steps) == count]
        unchecked += [f"Not checked, because {reason}: {', '.join(names)}."] if names else []
    passed = f"{len(made) - len(findings)}/{len(made)} passed." if made else "none could be made."
    return [Finding("Health checks", "summary", " ".join([passed, *unchecked])), *findings]


def _in_single_logs(verb: str, worst: str, excess: Callable[[np.ndarray], np.ndarray]) -> Callable[[Points], Found]:
    """Return a function that finds logs whose excess over a threshold is above 0."""

    def find(points: Points) -> Found:
        over = excess(points.values)
        count, total = int((over > 0).sum()), len(over)
        if not count:
            return None
        farthest = over.argmax()
        severity = "warning" if count >= max(FEWEST_LOGS, OFTEN * total) else "note"
        at = f"{points.values[farthest]:.3g} at update {points.steps[farthest]}"
        return severity, f"{verb} in {count} of {total} logs; {worst} {at}."

    return find


def _in_the_latest(largest: float, what: str) -> Callable[[Points], Found]:
    """Return a function that finds a mean of the latest logs above a threshold."""

    def find(points: Points) -> Found:
        latest = _last(points.values, LATEST_PART)
        since = f"in the latest {len(latest)} of {len(points.values)} logs"
        mean = _mean(latest)
        return ("warning", f"{mean:.0%} of the completions {what}, {since}.") if mean > largest else None

    return find


def _last(values: np.ndarray, part: float) -> np.ndarray:
    return values[-max(FEWEST_LOGS, math.ceil(part * len(values))) :]


def _mean(values: np.ndarray) -> float:
    return math.fsum(values) / len(values)


def _target_missed(points: Points) -> Found:
    missed = 1 - _mean(points.values)
    return ("warning", f"in {missed:.0%} of the updates.") if missed > TARGET_MISSED_MAX else None


def _entropy(points: Points) -> Found:
    steps, values = points
    # Of two logs in a row, so that no single one counts: the lower one before a fall, the higher one after it
    before = np.minimum(values, np.concatenate([values[:1], values[:-1]]))
    after = np.maximum(values[:-1], values[1:])
    falls = []
    for last in range(1, len(after)):
        start = np.searchsorted(steps, steps[last] - ENTROPY_UPDATES)
        if start < last:
            first = start + before[start:last].argmax()
            if before[first] > 0:
                falls.append((after[last] / before[first], first, last))
    part, first, last = min(falls, default=(math.inf, 0, 0))
    if part > ENTROPY_FACTOR:
        return None
    high, low = (f"{values[place]:.3g} at update {steps[place]}" for place in (first, last))
    return "warning", f"fell from {high} to {low}."


def _at_limits(logs: Logs, facts: Mapping[str, Any]) -> Points:
    """Return of each log with a search whether all bounds that are searched are where the search ends."""
    steps, moves = logs.points("bapo/search_steps")
    steps = steps[moves > 0]
    are_at_limits = np.ones(len(steps))
    for metric, limit in facts["limits"].items():
        bound = logs.points(metric)
        are_at_limits *= np.isin(steps, bound.steps[bound.values >= limit - 1e-4])
    return Points(steps, are_at_limits)


def _over_relaxed(points: Points) -> Found:
    late = _last(points.values, LATE_PART)
    if _mean(late) <= AT_LIMIT_MAX:
        return None
    return "warning", f"in {int(late.sum())} of the latest {len(late)} logs with a search."


def _has_reward(logs: Logs, facts: Mapping[str, Any]) -> Points:
    """Return of each log with a generation whether its reward is defined."""
    steps, _ = logs.points("completions/mean_length")
    return Points(steps, np.isin(steps, logs.points("reward").steps))


CHECKS = (
    Check(
        "No reward",
        "reward",
        lambda points: None if any(points.values) else ("warning", f"undefined in all {len(points.steps)} logs."),
        "No reward function returned a number, so nothing is trained.",
        {"A reward function that returns a number for each sample it applies to.": ""},
        measure=_has_reward,
    ),
    Check(
        "Masked samples",
        "bapo/masked_share",
        _in_single_logs(f"fraction above {MASKED_MAX:g}", "highest", lambda values: values - MASKED_MAX),
        "Samples whose tokens are all masked train nothing.",
        {
            "With `mask_truncated_completions`: a larger `max_completion_length`.": "",
            "With a replay buffer or partial rollouts: see `replay/masked` and `partial/masked`.": "",
        },
    ),
    Check(
        "Mean importance ratio",
        "ratio/mean",
        _in_single_logs(
            f"outside {RATIO_MEAN_MIN:g} to {RATIO_MEAN_MAX:g}",
            "farthest",
            lambda values: np.maximum(RATIO_MEAN_MIN / values, values / RATIO_MEAN_MAX) - 1,
        ),
        "The policy that sampled differs too much from the one that trains; near 1 is healthy.",
        {
            "Compare log-probabilities of vLLM and the trainer (`sampling/` metrics).": "uses_vllm",
            "A smaller `steps_per_generation` or `num_iterations`.": "has_stale_samples",
            "A smaller `replay_max_staleness`.": "has_queue",
            "A lower `learning_rate`.": "",
        },
    ),
    Check(
        "Effective sample size",
        "ratio/ess",
        _in_single_logs(f"below {ESS_MIN:g} of the samples", "lowest", lambda values: ESS_MIN - values),
        "A few tokens with large ratios dominate the update, which makes it noisy.",
        {"Fewer updates per generation.": "can_be_fresher", "A lower `learning_rate`.": ""},
    ),
    Check(
        "Chi-square divergence",
        "ratio/chi2",
        _in_single_logs(f"above {CHI2_MAX:g}", "highest", lambda values: values - CHI2_MAX),
        "For some tokens, the policy has moved far from the one that sampled them.",
        {
            "Fewer updates per generation.": "can_be_fresher",
            "A lower `learning_rate`.": "",
            "Ignore a single spike that the gradient norm does not show.": "",
        },
    ),
    Check(
        "Target missed",
        "bapo/target_met",
        _target_missed,
        "At the end of the search, positive tokens still contribute less than the target.",
        {
            "A lower `positive_contribution_target`, or larger batches.": "",
            "A higher `ratio_upper_max`.": "searches_upper",
            "A higher `ratio_lower_max`.": "searches_lower_alone",
            "`negative_weight_min` below 1.": "can_weigh",
            "A smaller `negative_weight_min`.": "searches_weight",
        },
        needs="target",
    ),
    Check(
        "Clip bounds at their maximum",
        "bapo/search_steps",
        _over_relaxed,
        "The search has no room left: the bounds no longer adapt.",
        {"A lower `positive_contribution_target`.": ""},
        needs="limits",
        measure=_at_limits,
    ),
    Check(
        "Entropy halved",
        "entropy",
        _entropy,
        "The policy may soon sample groups that are all alike. Harmless if the reward rises too.",
        {
            "A higher `ratio_upper_max`, which lets rare positive tokens through.": "searches_upper",
            "A higher `positive_contribution_target`.": "can_raise_target",
            "`temperature` 1.": "is_tempered",
            "A lower `learning_rate`.": "",
        },
    ),
    Check(
        "Zero-advantage groups",
        "frac_reward_zero_std",
        _in_the_latest(NO_SIGNAL_MAX, "are in groups whose rewards are all equal"),
        "Completions with advantage 0 train nothing.",
        {
            "Prompts that are neither too easy nor too hard, a larger `num_generations`, or a finer reward.": "",
            "`replay_zero_advantage`, which trains on buffered samples instead.": "can_refill",
        },
    ),
    Check(
        "Completions cut off",
        "completions/clipped_ratio",
        _in_the_latest(CUT_OFF_MAX, "reached the maximum length"),
        "The reward then measures length more than content.",
        {
            "A larger `max_completion_length`, or a prompt that asks for a shorter answer.": "",
            "Check the end-of-sequence token.": "",
            "`mask_truncated_completions`.": "can_mask_truncated",
        },
    ),
)
"""All health checks, in the order in which they are reported."""
