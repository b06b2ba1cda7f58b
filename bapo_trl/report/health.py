"""The health of a run in words: its logs in, findings out. Pure.

Thresholds of `ratio/mean`, `ratio/ess` and `ratio/chi2` are those that verl's documentation of rollout correction
warns at (`docs/algo/rollout_corr.md`). The others are rules of thumb: the value where most of a batch does not do what
it is there for. A log is a mean over `logging_steps` updates, so a single update can be farther off than it shows.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard


RATIO_MEAN_MIN, RATIO_MEAN_MAX = 0.5, 2.0
"""Range of the mean importance ratio (verl, rollout correction)."""

ESS_MIN = 0.3
"""Smallest effective sample size over the number of ratios (verl, rollout correction)."""

CHI2_MAX = 1.0
"""Largest chi-square divergence of the policy from the behaviour policy (verl, rollout correction)."""

TARGET_MISSED_MAX = 0.5
"""Largest part of the updates that may miss `positive_contribution_target`."""

ENTROPY_FACTOR, ENTROPY_UPDATES = 0.5, 50
"""The entropy falls to this part of itself within so many updates."""

NO_SIGNAL_MAX = 0.7
"""Largest share of completions in groups whose rewards are all equal, which DAPO (arXiv 2503.14476) samples anew."""

CUT_OFF_MAX = 0.5
"""Largest share of completions that end for their length."""

LATEST_PART = 0.25
"""Part of the logs, the latest, that lines on the present state of a run go by."""

OFTEN = 0.1
"""From this part of the logs on, a line on single logs is a warning; below, a note."""

Points = Sequence[tuple[int, float]]
"""Updates and finite values of a metric, in the order of the updates."""


@dataclass(frozen=True)
class Check:
    """
    A line that the report may have.

    Args:
        name (`str`): What the line is about, in a few words.
        metric (`str`): Name of the metric in the logs.
        rule (`str`): When the line appears.
        meaning (`str`): What it means.
        remedy (`str`): What to try.
        find (`Callable`): Takes the [`Points`] of the metric, at least one; returns severity and sentence, or `None`.
    """

    name: str
    metric: str
    rule: str
    meaning: str
    remedy: str
    find: Callable[[Points], tuple[str, str] | None]


@dataclass(frozen=True)
class Finding:
    """
    A line of the report.

    Args:
        name (`str`): What the line is about.
        severity (`str`): `warning`, `note` or `healthy`.
        sentence (`str`): What was found, with its numbers.
        meaning (`str`, *optional*): What it means.
        remedy (`str`, *optional*): What to try.
    """

    name: str
    severity: str
    sentence: str
    meaning: str = ""
    remedy: str = ""


def points_of(logs: Iterable[Mapping], metric: str) -> Points:
    """Return the updates and values of a metric where it was logged as a finite number."""
    points = ((log["step"], log.get(metric)) for log in logs)
    return [(step, value) for step, value in points if is_finite(value)]


def is_finite(value: object) -> TypeGuard[float]:
    """Return whether a logged value is a finite number; `None` and text are none."""
    return isinstance(value, int | float) and math.isfinite(value)


def examine(logs: Sequence[Mapping]) -> list[Finding]:
    """
    Return the health of a run, a finding for each check that finds something.

    Args:
        logs (sequence of mappings):
            Logs of the updates, with their `step`, in order.

    Returns:
        `list` of [`Finding`]: A single one of severity `healthy` if no check finds anything. Checks whose metric was
        not logged are named in it, or in a note at the end.
    """
    points = {check.metric: points_of(logs, check.metric) for check in CHECKS}
    made = [check for check in CHECKS if points[check.metric]]
    missing = ", ".join(f"{check.name} (`{check.metric}`)" for check in CHECKS if not points[check.metric])
    unchecked = f"Not checked, because not logged: {missing}." if missing else ""
    if not made:
        return [Finding("Not checked", "note", unchecked)]
    found = [(check, check.find(points[check.metric])) for check in made]
    findings = [Finding(check.name, *result, check.meaning, check.remedy) for check, result in found if result]
    if not findings:
        what = f"{len(logs)} logs" if len(logs) != 1 else "1 log"
        sentence = f"{len(made)} of {len(CHECKS)} checks made on {what}, and none found anything."
        return [Finding("Healthy", "healthy", f"{sentence} {unchecked}".strip())]
    return findings + ([Finding("Not checked", "note", unchecked)] if unchecked else [])


def describe(finding: Finding) -> str:
    """Return a finding as one line of text."""
    return f"[{finding.severity}] {finding.name}: {finding.sentence}" + (
        f" Try: {finding.remedy}" if finding.remedy else ""
    )


def _beyond(points: Points, excess: Callable[[float], float], verb: str, worst: str) -> tuple[str, str] | None:
    """Find logs whose excess over the threshold is above 0."""
    beyond = [(step, value) for step, value in points if excess(value) > 0]
    if not beyond:
        return None
    step, value = max(beyond, key=lambda point: excess(point[1]))
    severity = "warning" if len(beyond) >= OFTEN * len(points) else "note"
    return severity, f"{verb} in {len(beyond)} of {len(points)} logs; {worst} {value:.3g} at update {step}."


def _ratio_mean(points: Points) -> tuple[str, str] | None:
    def excess(value: float) -> float:
        return max(RATIO_MEAN_MIN / value - 1, value / RATIO_MEAN_MAX - 1) if value > 0 else math.inf

    return _beyond(points, excess, f"outside [{RATIO_MEAN_MIN:g}, {RATIO_MEAN_MAX:g}]", "farthest")


def _ess(points: Points) -> tuple[str, str] | None:
    return _beyond(points, lambda value: ESS_MIN - value, f"below {ESS_MIN:g}", "lowest")


def _chi2(points: Points) -> tuple[str, str] | None:
    return _beyond(points, lambda value: value - CHI2_MAX, f"above {CHI2_MAX:g}", "highest")


def _target_missed(points: Points) -> tuple[str, str] | None:
    missed = 1 - sum(value for _, value in points) / len(points)
    return ("warning", f"missed in {missed:.0%} of the updates.") if missed > TARGET_MISSED_MAX else None


def _entropy(points: Points) -> tuple[str, str] | None:
    falls = [
        (late / early, first, early, last, late)
        for index, (first, early) in enumerate(points)
        for last, late in points[index + 1 : index + 1 + ENTROPY_UPDATES]
        if last - first <= ENTROPY_UPDATES and late <= ENTROPY_FACTOR * early and early > 0
    ]
    if not falls:
        return None
    _, first, early, last, late = min(falls)
    return "warning", f"fell from {early:.3g} at update {first} to {late:.3g} at update {last}."


def _latest(points: Points, largest: float, what: str) -> tuple[str, str] | None:
    latest = points[-math.ceil(LATEST_PART * len(points)) :]
    mean = sum(value for _, value in latest) / len(latest)
    since = f"in the latest {len(latest)} of {len(points)} logs" if len(points) > 1 else "in the only log"
    return ("warning", f"{mean:.0%} of the completions {what}, {since}.") if mean > largest else None


def _no_signal(points: Points) -> tuple[str, str] | None:
    return _latest(points, NO_SIGNAL_MAX, "are in groups whose rewards are all equal")


def _cut_off(points: Points) -> tuple[str, str] | None:
    return _latest(points, CUT_OFF_MAX, "ended for their length")


_IN_A_LOG = f"in a log; a warning from {OFTEN:.0%} of the logs on, else a note"
_IN_THE_LATEST = f"over the latest {LATEST_PART:.0%} of the logs"

CHECKS = (
    Check(
        "Mean ratio",
        "ratio/mean",
        f"`ratio/mean` below {RATIO_MEAN_MIN:g} or above {RATIO_MEAN_MAX:g} {_IN_A_LOG}",
        "The samples come from another policy than the one that trains. It is near 1 for samples of a policy that is "
        "near, also for stale ones.",
        "Compare the sampler's log-probabilities with the trainer's (`sampling/` metrics). Then fresher samples: a "
        "smaller `steps_per_generation` or `num_iterations`, a `replay_max_staleness`. Then a lower `learning_rate`.",
        _ratio_mean,
    ),
    Check(
        "Effective sample size",
        "ratio/ess",
        f"`ratio/ess` below {ESS_MIN:g} {_IN_A_LOG}",
        "A few tokens with large ratios carry the update; it is as noisy as one of a much smaller batch.",
        "Fresher samples, or a lower `learning_rate`. `negative_ratio_cap` bounds what large ratios of "
        "negative-advantage tokens do.",
        _ess,
    ),
    Check(
        "Chi-square divergence",
        "ratio/chi2",
        f"`ratio/chi2` above {CHI2_MAX:g} {_IN_A_LOG}",
        "The ratios have heavy tails: the policy has moved far from the one that sampled, for some tokens.",
        "Fresher samples, or a lower `learning_rate`. A single spike that the gradient norm does not show can be left "
        "alone.",
        _chi2,
    ),
    Check(
        "Target share missed",
        "bapo/target_met",
        f"`bapo/target_met` is 0 in over {TARGET_MISSED_MAX:.0%} of the updates",
        "The search ends at the widest bounds, and positive tokens still contribute less than "
        "`positive_contribution_target`. With both bounds fixed it says only what the share is.",
        "A lower `positive_contribution_target`, a higher `ratio_upper_max`, larger batches, or "
        "`negative_weight_min` below 1, which reaches the target wherever there are positive tokens.",
        _target_missed,
    ),
    Check(
        "Entropy halved",
        "entropy",
        f"`entropy` falls to half of itself or less within {ENTROPY_UPDATES} updates (`logging_steps` up to "
        f"{ENTROPY_UPDATES})",
        "The policy settles fast, and soon samples groups that are all alike. Harmless where the reward rises with it "
        "and the task has one right answer.",
        "A higher `positive_contribution_target` or `ratio_upper_max`, which let rare positive tokens through; a "
        "lower `learning_rate`; `temperature` 1.",
        _entropy,
    ),
    Check(
        "Groups without signal",
        "frac_reward_zero_std",
        f"`frac_reward_zero_std` above {NO_SIGNAL_MAX:g} {_IN_THE_LATEST}",
        "Most completions have advantage 0 and train nothing: all of their group are right, or all wrong.",
        "Prompts that are neither too easy nor too hard, a larger `num_generations`, a finer reward, or "
        "`replay_zero_advantage`, which puts queued samples in their place.",
        _no_signal,
    ),
    Check(
        "Completions cut off",
        "completions/clipped_ratio",
        f"`completions/clipped_ratio` above {CUT_OFF_MAX:g} {_IN_THE_LATEST}",
        "Most completions end before their answer, so the reward says more about their length than about their "
        "content.",
        "A larger `max_completion_length`, a shorter form asked for in the prompt, a check that the end-of-sequence "
        "token is the model's own, or `mask_truncated_completions`.",
        _cut_off,
    ),
)
"""All lines that the report may have, in its order."""
