"""Golden tests of each health line: it appears just beyond its threshold, and not within."""

import math
import re

import pytest

from bapo_trl import BAPOConfig
from bapo_trl.report import health
from bapo_trl.report.health import CHECKS, Finding
from bapo_trl.report.runs import Logs
from tests.helpers.commands import ROOT
from tests.report.made_logs import HEALTHY, made_logs


HAS_TARGET = {"target": 0.5}
SEARCHES = {"target": 0.5, "limits": {"bapo/clip_low": 0.9, "bapo/clip_high": 3.0}}


def examine(logs: list[dict], facts=HAS_TARGET) -> list[Finding]:
    return health.examine(Logs(logs), facts)


def lines(facts=HAS_TARGET, **changes) -> list[tuple[str, str, str]]:
    return told(examine(made_logs(**changes), facts))


def told(findings: list[Finding]) -> list[tuple[str, str, str]]:
    """Return findings without the summary, which is the first one."""
    assert findings[0].severity == "summary"
    return [(found.severity, found.name, found.sentence) for found in findings[1:]]


def without(log: dict, *names: str) -> dict:
    return {name: value for name, value in log.items() if name not in names}


GOLDEN = [
    # metric, values just within, values just beyond, severity, name, sentence
    ("reward", [None, 0.5], None, "warning", "No reward", "undefined in all 20 logs."),
    ("bapo/masked_share", [0.5, 0.1], [0.6, 0.1, 1.0, 0.1], "warning", "Masked samples",
     "fraction above 0.5 in 2 of 20 logs; highest 1 at update 3."),
    ("ratio/mean", 0.5, 0.499, "warning", "Mean importance ratio",
     "outside 0.5 to 2 in 20 of 20 logs; farthest 0.499 at update 1."),
    ("ratio/mean", [1.0, 2.0, 0.5, 1.0], [1.0, 2.1, 0.4, 1.0], "warning", "Mean importance ratio",  # 2 of 20: often
     "outside 0.5 to 2 in 2 of 20 logs; farthest 0.4 at update 3."),  # 0.5 / 0.4 is farther than 2.1 / 2
    ("ratio/mean", [1.0, 2.0, 1.0], [1.0, 2.1, 1.0], "note", "Mean importance ratio",
     "outside 0.5 to 2 in 1 of 20 logs; farthest 2.1 at update 2."),
    ("ratio/ess", 0.3, 0.299, "warning", "Effective sample size",
     "below 0.3 of the samples in 20 of 20 logs; lowest 0.299 at update 1."),
    ("ratio/chi2", [0.1, 1.0, 0.1], [0.1, 4.5, 0.1], "note", "Chi-square divergence",
     "above 1 in 1 of 20 logs; highest 4.5 at update 2."),
    # 10 of 20 missed: half, not over half; 11 of 20 are
    ("bapo/target_met", [0.0] * 10 + [1.0], [0.0] * 11 + [1.0], "warning", "Target missed",
     "in 55% of the updates."),
    ("entropy", [1.0, 0.501], [1.0, 0.5], "warning", "Entropy halved",
     "fell from 1 at update 1 to 0.5 at update 2."),
    # the latest 5 of 20 logs count: 15 of another value before do not
    ("frac_reward_zero_std", [1.0] * 15 + [0.7], [0.0] * 15 + [0.71], "warning", "Zero-advantage groups",
     "71% of the completions are in groups whose rewards are all equal, in the latest 5 of 20 logs."),
    ("completions/clipped_ratio", [1.0] * 15 + [0.5], [0.0] * 15 + [0.51], "warning", "Completions cut off",
     "51% of the completions reached the maximum length, in the latest 5 of 20 logs."),
]  # fmt: skip


@pytest.mark.parametrize(("metric", "within", "beyond", "severity", "name", "sentence"), GOLDEN)
def test_each_line_at_its_threshold(metric, within, beyond, severity, name, sentence):
    assert lines(**{metric: within}) == []
    assert lines(**{metric: beyond}) == [(severity, name, sentence)]
    assert examine(made_logs(**{metric: beyond}))[0].sentence == "8/9 passed."


def test_every_check_has_a_golden_line_and_a_row_in_the_docs():
    of_limits = ("bapo/search_steps", "Clip bounds at their maximum")
    assert {(check.metric, check.name) for check in CHECKS} == {*((line[0], line[4]) for line in GOLDEN), of_limits}
    page = (ROOT / "docs" / "monitor.md").read_text()
    rows = [line for line in page.partition("| check |")[2].splitlines() if line.startswith("| ")]
    for check, row in zip(CHECKS, rows, strict=True):
        assert row.startswith(f"| {check.name} | ")


@pytest.mark.parametrize(
    ("low", "high", "moves", "sentence"),
    [
        # of 15 logs the latest 5: 3 at their limits are 60 %, 4 are more
        ([0.6] * 12 + [0.9], 3.0, 9.0, None),
        ([0.6] * 11 + [0.9], 3.0, 9.0, "in 4 of the latest 5 logs with a search."),
        (0.9, [3.0] * 10 + [2.95] * 2 + [3.0], 9.0, None),  # one of the bounds is not
        # 6 of 15 are of a search, 2 of them the latest third: logs 5 and 6
        ([0.6] * 4 + [0.9], 3.0, [9.0] * 6 + [0.0], "in 2 of the latest 2 logs with a search."),
        ([0.6] * 5 + [0.9], 3.0, [9.0] * 6 + [0.0], None),
    ],
)
def test_bounds_that_end_at_their_limits_late(low, high, moves, sentence):
    changes = {"bapo/clip_low": low, "bapo/clip_high": high, "bapo/search_steps": moves}
    line = ("warning", "Clip bounds at their maximum", sentence)
    assert lines(SEARCHES, size=15, **changes) == [line] * (sentence is not None)
    assert lines(size=15, **changes) == []


def test_the_entropy_halves_within_50_updates_or_slowly():
    falls = [1.0, 0.9, 0.8, 0.7, 0.6, 0.4]  # update 1, 11, ..., 51: 50 updates from the first to the last
    assert lines(every=10, entropy=falls) == [
        ("warning", "Entropy halved", "fell from 1 at update 1 to 0.4 at update 51.")
    ]
    assert lines(every=11, entropy=[1.0, 0.9, 0.8, 0.7, 0.51, 0.5]) == []  # 55 updates
    assert lines(every=51, entropy=[1.0, 0.1]) == []  # logged too seldom to tell
    assert lines(entropy=[0.2, 1.0]) == []  # it rose


@pytest.mark.parametrize(
    "entropy",
    [
        [1.0] * 5 + [0.4] + [1.0],  # a dip of one log
        [0.5] * 5 + [1.2] + [0.5],  # a peak of one log
        [1.0, 0.45] * 10,
        [1.0] * 19 + [0.4],  # the last log: nothing shows that it stays there
    ],
)
def test_a_single_log_of_the_entropy_is_no_fall(entropy):
    assert lines(entropy=entropy) == []
    lasting = [*entropy, 0.1, 0.1]
    (found,) = lines(size=len(lasting), entropy=lasting)
    assert found[2].endswith(f" to 0.1 at update {len(entropy) + 1}.")


BAD = {
    "ratio/mean": 5.0, "ratio/ess": 0.1, "ratio/chi2": 9.0, "bapo/target_met": 0.0, "frac_reward_zero_std": 1.0,
    "completions/clipped_ratio": 1.0, "reward": None, "bapo/masked_share": 1.0,
}  # fmt: skip


def test_one_log_has_no_verdict_bad_or_good():
    for values in (BAD, {}):
        (finding,) = examine(made_logs(1, **values), SEARCHES)
        assert (finding.severity, finding.name) == ("summary", "Health checks")
        start = "none could be made. Not checked, because logged once, which may be noise: `reward`, "
        assert finding.sentence.startswith(start)
        assert finding.sentence.count("`") == 20
    assert len(examine(made_logs(2, **BAD))) == 1 + 8  # two logs have


@pytest.mark.parametrize("size", [2, 5, 10])
def test_one_bad_log_of_a_few_is_a_note_and_two_are_a_warning(size):
    for bad, severity in ((1, "note"), (2, "warning")):
        assert [found[0] for found in lines(size=size, **{"ratio/chi2": [5.0] * bad + [0.1]})] == [severity]


def test_the_latest_logs_are_two_at_least():
    # The latest quarter of 4 logs is 1, the latest third of 3 with a search is 1
    cut_off = lines(size=4, **{"completions/clipped_ratio": [0.0, 0.0, 0.0, 0.9]})  # (0.0 + 0.9) / 2
    assert cut_off == []
    at_limits = {"bapo/clip_low": [0.6, 0.6, 0.9], "bapo/clip_high": 3.0}
    assert lines(SEARCHES, size=3, **at_limits) == []


@pytest.mark.parametrize("undefined", [None, math.nan, math.inf])
def test_undefined_values_count_for_nothing(undefined):
    assert lines(**{"ratio/chi2": [undefined, 0.1, undefined, 0.1]}) == []
    assert lines(**{"ratio/chi2": [undefined, 5.0, 0.1]}) == [
        ("note", "Chi-square divergence", "above 1 in 1 of 19 logs; highest 5 at update 2.")
    ]


def test_a_reward_is_looked_for_at_generations():
    logs = [without(log, "reward") for log in made_logs()]
    assert [found[1] for found in told(examine(logs))] == ["No reward"]
    some = [log if log["step"] % 2 else without(log, "reward", "completions/mean_length") for log in made_logs()]
    assert told(examine(some)) == []  # generations at every second update


def test_updates_that_train_nothing_are_told_as_such():
    of_tokens = [name for name in HEALTHY if name.startswith(("bapo/", "ratio/", "staleness/", "clip", "entropy"))]
    masked = [without(log, *of_tokens) | {"bapo/masked_share": 1.0} for log in made_logs(2, first=19)]
    assert [found[1] for found in told(examine(made_logs(18) + masked))] == ["Masked samples"]


def test_checks_that_could_not_be_made_are_named():
    plain = [{"loss": 0.1, "step": step, "entropy": 1.0} for step in (1, 2)]
    plain[0]["ratio/ess"] = 0.9
    (finding,) = examine(plain)
    assert finding.severity == "summary"
    assert finding.sentence == (
        "1/1 passed. Not checked, because not logged: `reward`, `bapo/masked_share`, `ratio/mean`, `ratio/chi2`, "
        "`bapo/target_met`, `frac_reward_zero_std`, `completions/clipped_ratio`. Not checked, because logged once, "
        "which may be noise: `ratio/ess`."
    )
    summary, found = examine([{**log, "ratio/ess": 0.1} for log in plain])
    assert (summary.sentence[:12], found.name) == ("1/2 passed. ", "Effective sample size")


def test_settings_that_a_line_names_exist():
    words = {word for check in CHECKS for word in re.findall(r"`(\w+)`", " ".join(check.remedies))}
    assert {word for word in words if not hasattr(BAPOConfig, word)} == set()
