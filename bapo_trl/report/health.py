"""The health of a run in words: its logs in, findings out. Pure.

Thresholds of `ratio/mean`, `ratio/ess` and `ratio/chi2` are those that verl's documentation of rollout correction
warns at (`docs/algo/rollout_corr.md`). The others are rules of thumb: the value where most of a batch does not do what
it is there for. A log is a mean over `logging_steps` updates, so a single update can be farther off than it shows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .facts import Facts
from .logs import Logs, Points


RATIO_MEAN_MIN, RATIO_MEAN_MAX = 0.5, 2.0  # of the importance ratio
ESS_MIN = 0.3  # effective sample size over the number of ratios
CHI2_MAX = 1.0
TARGET_MISSED_MAX = 0.5  # of the updates
ENTROPY_FACTOR, ENTROPY_UPDATES = 0.5, 50  # it falls to this part of itself within so many
NO_SIGNAL_MAX = 0.7  # of the completions, in groups whose rewards are all equal; DAPO samples these anew
CUT_OFF_MAX = 0.5  # of the completions
AT_LIMIT_MAX, LATE_PART = 0.6, 1 / 3  # of the logs with a search, in this part of them, the latest
MASKED_MAX = 0.5  # of the rows of an update
LATEST_PART = 0.25  # of the logs, that lines on the present state of a run go by
OFTEN = 0.1  # from this part of the logs on, a line on single logs is a warning; below, a note
FEWEST_LOGS = 2  # for a verdict, and for a warning: a single one may be noise


class Remedy(NamedTuple):
    """Something to try: a sentence, and the fact that it needs."""

    sentence: str
    needs: str = ""


@dataclass(frozen=True)
class Check:
    """A line that the report may have: its rule in words, what it means, and what to try."""

    name: str
    metric: str
    rule: str
    meaning: str
    remedies: tuple[Remedy, ...]
    # Of at least `FEWEST_LOGS` values; returns severity and sentence, if anything is found
    find: Callable[[Points], tuple[str, str] | None]
    needs: str = ""  # fact without which it is not made
    measure: Callable[[Logs, Facts], Points] | None = None  # by default, the finite values of the metric

    def points(self, logs: Logs, facts: Facts) -> Points:
        """Return what the check goes by."""
        return self.measure(logs, facts) if self.measure else logs.finite(self.metric)

    def remedy(self, facts: Facts) -> str:
        """Return what to try, in sentences."""
        return " ".join(remedy.sentence for remedy in self.remedies if facts.has(remedy.needs))


@dataclass(frozen=True)
class Finding:
    """A line of the report: what it is about, `warning`, `note` or `healthy`, and what was found."""

    name: str
    severity: str
    sentence: str
    meaning: str = ""
    remedy: str = ""


def examine(logs: Logs, facts: Facts | None = None) -> list[Finding]:
    """
    Return the health of a run: a finding for each check that finds something, or a single one that says so.

    Checks whose metric was not logged, or in a single log, are named in it, or in a note at the end. Checks that need
    facts of the run are made where it has written them.
    """
    facts = facts or Facts()
    checks = [check for check in CHECKS if facts.has(check.needs)]
    points = {check: check.points(logs, facts) for check in checks}
    made = [check for check in checks if len(points[check].steps) >= FEWEST_LOGS]
    unchecked = _unchecked({check: len(points[check].steps) for check in checks if check not in made})
    if not made:
        return [Finding("Not checked", "note", unchecked)]
    found = [(check, check.find(points[check])) for check in made]
    findings = (
        _no_reward(logs)
        + _masked_rows(logs)
        + [Finding(check.name, *result, check.meaning, check.remedy(facts)) for check, result in found if result]
    )
    if not findings:
        sentence = f"{len(made)} of {len(checks)} checks made on {len(logs)} logs, and none found anything."
        return [Finding("Healthy", "healthy", f"{sentence} {unchecked}".strip())]
    return findings + ([Finding("Not checked", "note", unchecked)] if unchecked else [])


def _unchecked(counts: dict[Check, int]) -> str:
    """Return a sentence for each reason why checks are not made, by the number of logs that they have."""
    sentences = []
    for count, reason in ((0, "not logged"), (1, "logged once, which may be noise")):
        names = ", ".join(f"{check.name} (`{check.metric}`)" for check, found in counts.items() if found == count)
        sentences += [f"Not checked, because {reason}: {names}."] if names else []
    return " ".join(sentences)


def _no_reward(logs: Logs) -> list[Finding]:
    generations = len(logs.logged("completions/mean_length").steps)
    if generations < FEWEST_LOGS or len(logs.finite("reward").steps):
        return []
    return [
        Finding(
            "No reward",
            "warning",
            f"undefined in all {generations} logs.",
            "No reward function applied to any sample: each returned None, or NaN. Nothing is trained.",
            "A reward function that returns a number where it applies.",
        )
    ]


def _masked_rows(logs: Logs) -> list[Finding]:
    shares = logs.finite("bapo/masked_share")
    found = _beyond(shares, shares.values - MASKED_MAX, f"`bapo/masked_share` above {MASKED_MAX:g}", "highest")
    if found is None or len(shares.steps) < FEWEST_LOGS:
        return []
    return [
        Finding(
            "Masked rows",
            *found,
            "Rows whose tokens are all masked train nothing. An update of such rows alone has no entropy, ratio or "
            "staleness.",
            "A larger `max_completion_length`, if `mask_truncated_completions` is set and completions are cut off. "
            "With a replay queue or partial rollouts, look at `replay/masked` and `partial/masked`.",
        )
    ]


def describe(finding: Finding) -> str:
    """Return a finding as one line of text."""
    advice = f" Try: {finding.remedy}" if finding.remedy else ""
    return f"[{finding.severity}] {finding.name}: {finding.sentence}{advice}"


def _beyond(points: Points, excess: np.ndarray, verb: str, worst: str) -> tuple[str, str] | None:
    """Find logs whose excess over the threshold is above 0."""
    count, total = int((excess > 0).sum()), len(excess)
    if not count:
        return None
    farthest = excess.argmax()
    severity = "warning" if count >= max(FEWEST_LOGS, OFTEN * total) else "note"
    at = f"{points.values[farthest]:.3g} at update {points.steps[farthest]}"
    return severity, f"{verb} in {count} of {total} logs; {worst} {at}."


def _ratio_mean(points: Points) -> tuple[str, str] | None:
    is_ratio = points.values > 0
    values = np.where(is_ratio, points.values, 1.0)
    excess = np.where(is_ratio, np.maximum(RATIO_MEAN_MIN / values, values / RATIO_MEAN_MAX) - 1, math.inf)
    return _beyond(points, excess, f"outside [{RATIO_MEAN_MIN:g}, {RATIO_MEAN_MAX:g}]", "farthest")


def _mean(values: np.ndarray) -> float:
    return math.fsum(values) / len(values)


def _target_missed(points: Points) -> tuple[str, str] | None:
    missed = 1 - _mean(points.values)
    return ("warning", f"missed in {missed:.0%} of the updates.") if missed > TARGET_MISSED_MAX else None


def _entropy(points: Points) -> tuple[str, str] | None:
    steps, values = points
    # Of two logs in a row, so that no single one counts: the lower one before a fall, the higher one after it
    lasting_before = np.concatenate([values[:1], np.minimum(values[1:-1], values[:-2])])
    lasting_after = np.maximum(values[:-1], values[1:])
    deepest = []  # fall between logs that are so many logs apart
    for apart in range(1, 1 + min(ENTROPY_UPDATES, len(lasting_after) - 1)):
        early, late = lasting_before[:-apart], lasting_after[apart:]
        is_near = steps[apart:-1] - steps[: -apart - 1] <= ENTROPY_UPDATES
        falls = np.flatnonzero((late <= ENTROPY_FACTOR * early) & (early > 0) & is_near)
        if len(falls):
            first = falls[(late[falls] / early[falls]).argmin()]
            deepest.append((late[first] / early[first], first, first + apart))
    if not deepest:
        return None
    _, first, last = min(deepest)
    return (
        "warning",
        f"fell from {values[first]:.3g} at update {steps[first]} to {values[last]:.3g} at update {steps[last]}.",
    )


def _latest(points: Points, largest: float, what: str) -> tuple[str, str] | None:
    total = len(points.values)
    latest = points.values[-max(FEWEST_LOGS, math.ceil(LATEST_PART * total)) :]
    mean = _mean(latest)
    since = f"in the latest {len(latest)} of {total} logs"
    return ("warning", f"{mean:.0%} of the completions {what}, {since}.") if mean > largest else None


def _at_limits(logs: Logs, facts: Facts) -> Points:
    """Return of each log whether all bounds that are searched are where the search ends; NaN if none was moved."""
    steps, moves = logs.finite("bapo/search_steps")
    are_at_limits = np.where(moves > 0, 1.0, math.nan)
    for metric, limit in facts.limits.items():
        bound = logs.finite(metric)
        are_at_limits *= np.isin(steps, bound.steps[bound.values >= limit - 1e-4])
    return Points(steps, are_at_limits)


def _over_relaxed(points: Points) -> tuple[str, str] | None:
    searched = points.values[np.isfinite(points.values)]
    late = searched[-max(FEWEST_LOGS, math.ceil(LATE_PART * len(searched))) :]
    if len(late) < FEWEST_LOGS or _mean(late) <= AT_LIMIT_MAX:
        return None
    return "warning", f"at their limits in {int(late.sum())} of the latest {len(late)} logs with a search."


_IN_A_LOG = f"in a log; a warning if {OFTEN:.0%} of the logs are, at least {FEWEST_LOGS}, else a note"
_IN_THE_LATEST = f"over the latest {LATEST_PART:.0%} of the logs, at least {FEWEST_LOGS}"

CHECKS = (
    Check(
        "Mean ratio",
        "ratio/mean",
        f"`ratio/mean` below {RATIO_MEAN_MIN:g} or above {RATIO_MEAN_MAX:g} {_IN_A_LOG}",
        "The samples come from another policy than the one that trains. It is near 1 for samples of a policy that is "
        "near, also for stale ones.",
        (
            Remedy("Compare vLLM's log-probabilities with the trainer's (`sampling/` metrics).", "uses_vllm"),
            Remedy("Fresher samples: a smaller `steps_per_generation` or `num_iterations`.", "has_stale_samples"),
            Remedy("A smaller `replay_max_staleness`.", "has_queue"),
            Remedy("A lower `learning_rate`."),
        ),
        _ratio_mean,
    ),
    Check(
        "Effective sample size",
        "ratio/ess",
        f"`ratio/ess` below {ESS_MIN:g} {_IN_A_LOG}",
        "A few tokens with large ratios carry the update; it is as noisy as one of a much smaller batch.",
        (Remedy("Fresher samples.", "can_be_fresher"), Remedy("A lower `learning_rate`.")),
        lambda points: _beyond(points, ESS_MIN - points.values, f"below {ESS_MIN:g}", "lowest"),
    ),
    Check(
        "Chi-square divergence",
        "ratio/chi2",
        f"`ratio/chi2` above {CHI2_MAX:g} {_IN_A_LOG}",
        "The ratios have heavy tails: the policy has moved far from the one that sampled, for some tokens.",
        (
            Remedy("Fresher samples.", "can_be_fresher"),
            Remedy("A lower `learning_rate`."),
            Remedy("A single spike that the gradient norm does not show can be left alone."),
        ),
        lambda points: _beyond(points, points.values - CHI2_MAX, f"above {CHI2_MAX:g}", "highest"),
    ),
    Check(
        "Target share missed",
        "bapo/target_met",
        f"`bapo/target_met` is 0 in over {TARGET_MISSED_MAX:.0%} of the updates, where a bound or a weight is "
        "searched",
        "The search goes to its end, and positive tokens still contribute less than `positive_contribution_target`.",
        (
            Remedy("A lower `positive_contribution_target`, or larger batches."),
            Remedy("A higher `ratio_upper_max`.", "searches_upper"),
            Remedy("A higher `ratio_lower_max`, the only bound that is searched.", "searches_lower_alone"),
            Remedy(
                "`negative_weight_min` below 1, which reaches the target wherever there are positive tokens.",
                "can_weigh",
            ),
            Remedy("A smaller `negative_weight_min`.", "can_weigh_less"),
        ),
        _target_missed,
        "has_target",
    ),
    Check(
        "Bounds at their limits",
        "bapo/search_steps",
        f"`bapo/clip_low` and `bapo/clip_high`, as far as they are searched, at the ends of the search in over "
        f"{AT_LIMIT_MAX:.0%} of the latest third of the logs with a search (with the settings of the run)",
        "The bounds no longer choose: they let through all that they may. Late in a training this is what the VESPO "
        "paper calls over-relaxed.",
        (
            Remedy("A lower `positive_contribution_target`, which helps where it is missed as well."),
            Remedy("A smaller `ratio_upper_max`.", "searches_upper"),
            Remedy("A smaller `ratio_lower_max`.", "searches_lower"),
        ),
        _over_relaxed,
        "limits",
        _at_limits,
    ),
    Check(
        "Entropy halved",
        "entropy",
        f"`entropy` falls to half of itself or less within {ENTROPY_UPDATES} updates, and stays there for two logs "
        f"(`logging_steps` up to {ENTROPY_UPDATES})",
        "The policy settles fast, and soon samples groups that are all alike. Harmless where the reward rises with it "
        "and the task has one right answer.",
        (
            Remedy("A higher `ratio_upper_max`, to let rare positive tokens through.", "searches_upper"),
            Remedy("A higher `positive_contribution_target`.", "can_raise_target"),
            Remedy("`temperature` 1.", "is_tempered"),
            Remedy("A lower `learning_rate`."),
        ),
        _entropy,
    ),
    Check(
        "Groups without signal",
        "frac_reward_zero_std",
        f"`frac_reward_zero_std` above {NO_SIGNAL_MAX:g} {_IN_THE_LATEST}",
        "Most completions have advantage 0 and train nothing: all of their group are right, or all wrong.",
        (
            Remedy("Prompts that are neither too easy nor too hard, a larger `num_generations`, or a finer reward."),
            Remedy("`replay_zero_advantage`, which puts queued samples in their place.", "can_refill"),
        ),
        lambda points: _latest(points, NO_SIGNAL_MAX, "are in groups whose rewards are all equal"),
    ),
    Check(
        "Completions cut off",
        "completions/clipped_ratio",
        f"`completions/clipped_ratio` above {CUT_OFF_MAX:g} {_IN_THE_LATEST}",
        "Most completions end before their answer, so the reward says more about their length than about their "
        "content.",
        (
            Remedy(
                "A larger `max_completion_length`, a shorter form asked for in the prompt, or a check that the "
                "end-of-sequence token is the model's own."
            ),
            Remedy("`mask_truncated_completions`.", "can_mask_truncated"),
        ),
        lambda points: _latest(points, CUT_OFF_MAX, "ended for their length"),
    ),
)
"""All lines that the report may have, in its order."""
