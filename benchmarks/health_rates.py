"""
How well the health checks of a report tell bad runs from good ones, by the runs of four studies in `results/`.

    python -m benchmarks.health_rates

Rules, written after a first look at these runs with other halves. VESPO stands apart since most of the wrong warnings
on ratios were of its runs, of both halves:

1. A run is bad if its final accuracy is below 80 % of the best mean of its setting (over methods and learning rates),
   or if its accuracy fell by a third of its best value during training. All others are good.
2. Limits are fitted on one half of the runs: even seeds, or every second run of a study with one seed. The other half
   shows the errors. A limit may be stricter than the check that was recorded, but not looser.
3. The fitted limit has the largest difference between the rates of warnings of bad and of good runs, with at most 5 %
   of the good ones.
4. A check separates if on the other half, too, it warns of at most 5 % of the good runs, and at least three times as
   often of a bad run as of a good one.

The runs hold the warnings of the checks of their time, with how often a limit was exceeded, but no logs. Those of the
chat model and of asynchronous training hold no warnings: of the chat model, two values stand for them.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from statistics import fmean
from typing import NamedTuple

from bapo_trl.compare.results import Row, read_rows
from bapo_trl.compare.tables import markdown
from benchmarks.common import RESULTS


STUDIES = ("regime", "regime_pilot")
CHAT_STUDIES = ("chat_chain_sum", "chat_leg_counting", "chat_pilot", "chat_rates", "chat_rates_legs")
BAD_BELOW, FALL = 0.8, 1 / 3  # of the best mean of a setting; of the best accuracy of a run
FALSE_MAX, TIMES = 0.05, 3  # rules 3 and 4
OFTEN = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)  # of the logs
HIGH = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
LOST = (0.5, 0.6, 0.7, 0.75, 0.8)  # of the entropy


class Judged(NamedTuple):
    """A run, whether it is bad, and whether limits are fitted on it."""

    row: Row
    is_bad: bool
    is_for_fit: bool


class Check(NamedTuple):
    """What a check goes by, and the limits that are tried for it."""

    name: str
    value: Callable[[Row], float | None]  # at the limit or beyond: a warning; `None`: no warning
    limits: Sequence[float]
    text: str  # of a limit
    studies: tuple[str, ...] = STUDIES
    is_of_vespo: bool | None = None  # `None`: of all losses


def part(name: str) -> Callable[[Row], float | None]:
    """Return a function that reads a part, 0 to 1, from the warning of a name: `NUMBER of NUMBER`, or a percentage."""

    def value(row: Row) -> float | None:
        warning = row.warnings.get(name, "")
        if found := re.match(r".*?(\d+)%", warning):
            return float(found[1]) / 100
        found = re.search(r"in (\d+) of (?:the latest )?(\d+) logs", warning)
        return float(found[1]) / float(found[2]) if found else None

    return value


def lost_entropy(row: Row) -> float | None:
    """Return the part of the entropy that was lost within 50 updates."""
    found = re.search(r"fell from (\S+) at .* to (\S+) at", row.warnings.get("Entropy halved", ""))
    return 1 - float(found[2]) / float(found[1]) if found else None


CHECKS = (
    *(
        Check(f"{name}{text}", part(name), OFTEN, limit, is_of_vespo=is_of_vespo)
        for name, limit in (
            ("Effective sample size", "below 0.3 in {:.0%} of the logs"),
            ("Chi-square divergence", "above 1 in {:.0%} of the logs"),
        )
        for text, is_of_vespo in (("", False), (", VESPO", True))
    ),
    *(
        Check(name, part(name), limits, text)
        for name, limits, text in (
            ("Zero-advantage groups", HIGH[2:], "{:.0%} of the latest completions"),
            ("Completions cut off", HIGH, "{:.0%} of the latest completions"),
            ("Mean importance ratio", OFTEN, "outside 0.5 to 2 in {:.0%} of the logs"),
            ("Target missed", HIGH, "in {:.0%} of the updates"),
            ("Clip bounds at their maximum", HIGH[1:], "in {:.0%} of the latest logs"),
        )
    ),
    Check("Clip bounds, chat model", lambda row: row.at_limits, HIGH, "in {:.0%} of the updates", CHAT_STUDIES),
    Check("Entropy halved", lost_entropy, LOST, "{:.0%} lost within 50 updates"),
    Check(
        "Entropy halved, chat model",
        lambda row: 1 - (row.entropy_ratio or 1),
        LOST,
        "{:.0%} lost at the end",
        CHAT_STUDIES,
    ),
)


class Errors(NamedTuple):
    """Counts of both kinds of error."""

    missed: int
    num_bad: int
    false: int
    num_good: int

    @property
    def warned(self) -> tuple[float, float]:
        """Rates of warnings, of bad and of good runs."""
        return 1 - self.missed / self.num_bad, self.false / self.num_good

    @property
    def cells(self) -> list[str]:
        """Both as text."""
        return [f"{self.missed} of {self.num_bad}", f"{self.false} of {self.num_good} ({self.warned[1]:.1%})"]


@cache
def judged(studies: tuple[str, ...]) -> tuple[Judged, ...]:
    """Return the runs that ended."""
    found = []
    for study in studies:
        runs = [row for row in read_rows(RESULTS / f"{study}.json").values() if row.final is not None]
        finals = defaultdict(list)
        for row in runs:
            rate = row.settings.get("learning_rate")
            finals[_setting(row), row.arm, rate].append(row.final)
        best: dict[str, float] = defaultdict(float)
        for (setting, *_), values in finals.items():
            best[setting] = max(best[setting], fmean(values))
        has_seeds = len({row.seed for row in runs}) > 1
        for place, row in enumerate(runs):
            highest = max((accuracy for _, accuracy in row.curve), default=0)
            has_fallen = bool(row.max_drawdown) and row.max_drawdown >= FALL * highest
            is_bad = has_fallen or row.final < BAD_BELOW * best[_setting(row)]
            found.append(Judged(row, is_bad, (row.seed if has_seeds else place) % 2 == 0))
    return tuple(found)


def _setting(row: Row) -> str:
    return str(sorted((name, value) for name, value in row.sweep.items() if name != "learning_rate"))


def errors(check: Check, limit: float, is_for_fit: bool) -> Errors:
    """Return the errors of a check at a limit, on one half of the runs."""
    runs = [each for each in judged(check.studies) if each.is_for_fit == is_for_fit]
    if check.is_of_vespo is not None:
        runs = [each for each in runs if ("VESPO" in each.row.arm) == check.is_of_vespo]
    warned = [(value := check.value(each.row)) is not None and value >= limit - 1e-9 for each in runs]
    bad = [has_warning for has_warning, each in zip(warned, runs, strict=True) if each.is_bad]
    return Errors(bad.count(False), len(bad), sum(warned) - sum(bad), len(runs) - len(bad))


def fitted(check: Check) -> tuple[float, Errors]:
    """Return the limit by rule 3, and its errors on the half that it is fitted on."""
    tried = {limit: errors(check, limit, is_for_fit=True) for limit in check.limits}
    allowed = [limit for limit in tried if tried[limit].warned[1] <= FALSE_MAX] or [max(tried)]

    def lead(limit: float) -> float:
        bad, good = tried[limit].warned
        return bad - good

    limit = max(allowed, key=lead)
    return limit, tried[limit]


def health_table() -> str:
    """Return each check with its fitted limit, both kinds of error on both halves, and whether it separates."""
    lines = []
    for check in CHECKS:
        limit, at_fit = fitted(check)
        shown = errors(check, limit, is_for_fit=False)
        bad, good = shown.warned
        separates = bad > 0 and good <= FALSE_MAX and bad >= TIMES * good
        text = check.text.format(limit)
        lines.append([check.name, text, *at_fit.cells, *shown.cells, "yes" if separates else "no"])
    halves = [f"{half}: {kind}" for half in ("fit", "shown") for kind in ("bad runs missed", "good runs warned")]
    return markdown(["check", "limit", *halves, "separates"], lines)


if __name__ == "__main__":
    print(health_table())
