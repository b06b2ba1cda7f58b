"""Golden tests of each health line: it appears just beyond its threshold, and not within."""

import math
import re
from pathlib import Path

import pytest

from bapo_trl.report.facts import Facts
from bapo_trl.report.health import CHECKS, Finding
from bapo_trl.report.health import examine as examine_columns
from bapo_trl.report.logs import Logs
from tests.report.made_logs import HEALTHY, made_logs


ROOT = Path(__file__).resolve().parents[2]
ALL_WELL = "7 of 7 checks made on 20 logs, and none found anything."


SEARCHES = Facts(searches_weight=True, target=0.5)


def examine(logs: list[dict]) -> list[Finding]:
    return examine_columns(Logs(logs), SEARCHES)


def lines(**changes) -> list[tuple[str, str, str]]:
    return [(finding.severity, finding.name, finding.sentence) for finding in examine(made_logs(**changes))]


def test_a_healthy_run_has_a_single_line_that_says_so():
    assert lines() == [("healthy", "Healthy", ALL_WELL)]


GOLDEN = [
    # metric, values just within, values just beyond, severity, name, sentence
    ("ratio/mean", 0.5, 0.499, "warning", "Mean ratio",
     "outside [0.5, 2] in 20 of 20 logs; farthest 0.499 at update 1."),
    ("ratio/mean", 2.0, 2.01, "warning", "Mean ratio",
     "outside [0.5, 2] in 20 of 20 logs; farthest 2.01 at update 1."),
    ("ratio/mean", [1.0, 2.0, 0.5, 1.0], [1.0, 2.1, 0.4, 1.0], "warning", "Mean ratio",  # 2 of 20: often
     "outside [0.5, 2] in 2 of 20 logs; farthest 0.4 at update 3."),  # 0.5 / 0.4 is farther than 2.1 / 2
    ("ratio/mean", [1.0, 2.0, 1.0], [1.0, 2.1, 1.0], "note", "Mean ratio",
     "outside [0.5, 2] in 1 of 20 logs; farthest 2.1 at update 2."),
    ("ratio/ess", 0.3, 0.299, "warning", "Effective sample size",
     "below 0.3 in 20 of 20 logs; lowest 0.299 at update 1."),
    ("ratio/ess", [0.9, 0.3, 0.9], [0.9, 0.25, 0.9], "note", "Effective sample size",
     "below 0.3 in 1 of 20 logs; lowest 0.25 at update 2."),
    ("ratio/chi2", 1.0, 1.01, "warning", "Chi-square divergence",
     "above 1 in 20 of 20 logs; highest 1.01 at update 1."),
    ("ratio/chi2", [0.1, 1.0, 0.1], [0.1, 4.5, 0.1], "note", "Chi-square divergence",
     "above 1 in 1 of 20 logs; highest 4.5 at update 2."),
    # 10 of 20 missed: half, not over half; 11 of 20 are
    ("bapo/target_met", [0.0] * 10 + [1.0], [0.0] * 11 + [1.0], "warning", "Target share missed",
     "missed in 55% of the updates."),
    ("entropy", [1.0, 0.501], [1.0, 0.5], "warning", "Entropy halved",
     "fell from 1 at update 1 to 0.5 at update 2."),
    # the latest 5 of 20 logs count: 15 of another value before do not
    ("frac_reward_zero_std", [1.0] * 15 + [0.7], [0.0] * 15 + [0.71], "warning", "Groups without signal",
     "71% of the completions are in groups whose rewards are all equal, in the latest 5 of 20 logs."),
    ("completions/clipped_ratio", [1.0] * 15 + [0.5], [0.0] * 15 + [0.51], "warning", "Completions cut off",
     "51% of the completions ended for their length, in the latest 5 of 20 logs."),
]  # fmt: skip


@pytest.mark.parametrize(("metric", "within", "beyond", "severity", "name", "sentence"), GOLDEN)
def test_each_line_at_its_threshold(metric, within, beyond, severity, name, sentence):
    assert lines(**{metric: within}) == [("healthy", "Healthy", ALL_WELL)]
    assert lines(**{metric: beyond}) == [(severity, name, sentence)]


def test_every_check_has_a_golden_line():
    assert {check.metric for check in CHECKS} == {golden[0] for golden in GOLDEN} | {"bapo/search_steps"}
    assert {check.name for check in CHECKS} == {golden[4] for golden in GOLDEN} | {"Bounds at their limits"}


BOTH = Facts(target=0.5, limits={"bapo/clip_low": 0.9, "bapo/clip_high": 3.0})


@pytest.mark.parametrize(
    ("low", "high", "moves", "sentence"),
    [
        # of 15 logs the latest 5: 3 at their limits are 60 %, 4 are more
        ([0.6] * 12 + [0.9], 3.0, 9.0, None),
        ([0.6] * 11 + [0.9], 3.0, 9.0, "at their limits in 4 of the latest 5 logs with a search."),
        (0.9, [3.0] * 10 + [2.95] * 2 + [3.0], 9.0, None),  # one of the bounds is not
        (0.9, [2.95] * 10 + [3.0], 9.0, "at their limits in 5 of the latest 5 logs with a search."),
        # 6 of 15 are of a search, 2 of them the latest third: logs 5 and 6
        ([0.6] * 4 + [0.9], 3.0, [9.0] * 6 + [0.0], "at their limits in 2 of the latest 2 logs with a search."),
        ([0.6] * 5 + [0.9], 3.0, [9.0] * 6 + [0.0], None),
        (0.9, 3.0, 0.0, None),
    ],
)
def test_bounds_that_end_at_their_limits_late(low, high, moves, sentence):
    logs = made_logs(15, **{"bapo/clip_low": low, "bapo/clip_high": high, "bapo/search_steps": moves})
    found = [(finding.severity, finding.name, finding.sentence) for finding in examine_columns(Logs(logs), BOTH)]
    healthy = "8 of 8 checks made on 15 logs, and none found anything."
    line = ("healthy", "Healthy", healthy) if sentence is None else ("warning", "Bounds at their limits", sentence)
    assert found == [line]
    assert [finding.name for finding in examine(logs)] == ["Healthy"]


def test_the_entropy_halves_within_50_updates_or_slowly():
    falls = [1.0, 0.9, 0.8, 0.7, 0.6, 0.4]  # update 1, 11, ..., 51: 50 updates from the first to the last
    assert lines(every=10, entropy=falls) == [
        ("warning", "Entropy halved", "fell from 1 at update 1 to 0.4 at update 51.")
    ]
    assert lines(every=11, entropy=[1.0, 0.9, 0.8, 0.7, 0.51, 0.5])[0][0] == "healthy"  # 55 updates
    assert lines(every=51, entropy=[1.0, 0.1])[0][0] == "healthy"  # logged too seldom to tell
    assert lines(entropy=[0.2, 1.0])[0][0] == "healthy"  # it rose


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
    assert lines(entropy=entropy) == [("healthy", "Healthy", ALL_WELL)]
    lasting = [*entropy, 0.1, 0.1]
    sentence = f"to 0.1 at update {len(entropy) + 1}."
    assert [found[2].partition(" to")[2] for found in lines(size=len(lasting), entropy=lasting)] == [sentence[2:]]


def test_two_logs_of_a_fall_are_no_fall():
    assert lines(size=2, entropy=[1.0, 0.1]) == [
        ("healthy", "Healthy", "7 of 7 checks made on 2 logs, and none found anything.")
    ]


BAD = {
    "ratio/mean": 5.0, "ratio/ess": 0.1, "ratio/chi2": 9.0, "bapo/target_met": 0.0, "frac_reward_zero_std": 1.0,
    "completions/clipped_ratio": 1.0, "reward": None,
}  # fmt: skip


def test_one_log_has_no_verdict_bad_or_good():
    for values in (BAD, {}):
        (finding,) = examine(made_logs(1, **values))
        assert (finding.severity, finding.name) == ("note", "Not checked")
        assert finding.sentence.startswith("Not checked, because logged once, which may be noise: Mean ratio (`ratio/")
        assert finding.sentence.count("(`") == 7
    both = Logs(made_logs(1, **{"bapo/clip_low": 0.9, "bapo/clip_high": 3.0}))
    assert [finding.name for finding in examine_columns(both, BOTH)] == ["Not checked"]
    assert len(examine(made_logs(2, **BAD))) == 7  # two logs have


def test_a_metric_that_was_logged_once_has_no_verdict():
    *rest, last = made_logs(20)
    once = [*({name: value for name, value in log.items() if name != "ratio/ess"} for log in rest), last]
    (finding,) = examine(once)
    assert finding.severity == "healthy"
    assert finding.sentence == (
        "6 of 7 checks made on 20 logs, and none found anything. Not checked, because logged once, which may be "
        "noise: Effective sample size (`ratio/ess`)."
    )
    masked_once = [*made_logs(19), {**made_logs(1, first=20)[0], "bapo/masked_share": 0.9}]
    assert [finding.name for finding in examine(masked_once)] == ["Healthy"]


@pytest.mark.parametrize("size", [2, 5, 10])
def test_one_bad_log_of_a_few_is_a_note_and_two_are_a_warning(size):
    """10 % of these are no full log."""
    for bad, severity in ((1, "note"), (2, "warning")):
        chi2 = [5.0] * bad + [0.1]
        assert [found[0] for found in lines(size=size, **{"ratio/chi2": chi2})] == [severity]


def test_the_latest_logs_are_two_at_least():
    # The latest quarter of 4 logs is 1, the latest third of 3 with a search is 1
    cut_off = lines(size=4, **{"completions/clipped_ratio": [0.0, 0.0, 0.0, 0.9]})  # (0.0 + 0.9) / 2
    assert [found[0] for found in cut_off] == ["healthy"]
    (found,) = lines(size=4, **{"completions/clipped_ratio": [0.0, 0.0, 0.2, 0.9]})  # (0.2 + 0.9) / 2
    assert found[2] == "55% of the completions ended for their length, in the latest 2 of 4 logs."
    at_limits = {"bapo/clip_low": [0.6, 0.6, 0.9], "bapo/clip_high": 3.0}
    (found,) = examine_columns(Logs(made_logs(3, **at_limits)), BOTH)
    assert found.severity == "healthy"


def test_several_lines_come_in_their_order():
    found = lines(**{"completions/clipped_ratio": 0.9, "ratio/chi2": 3.0, "ratio/ess": 0.2})
    assert [name for _, name, _ in found] == ["Effective sample size", "Chi-square divergence", "Completions cut off"]


@pytest.mark.parametrize("undefined", [None, math.nan, math.inf, "text"])
def test_undefined_values_count_for_nothing(undefined):
    assert lines(**{"ratio/chi2": [undefined, 0.1, undefined, 0.1]}) == [("healthy", "Healthy", ALL_WELL)]
    assert lines(**{"ratio/chi2": [undefined, 5.0, 0.1]}) == [
        ("note", "Chi-square divergence", "above 1 in 1 of 19 logs; highest 5 at update 2.")
    ]


def without(log: dict, *names: str) -> dict:
    return {name: value for name, value in log.items() if name not in names}


def test_a_run_without_any_reward_is_not_healthy():
    # as TRL logs it: the deviation of no reward is NaN, not 0. Earlier versions logged `None`
    logs = made_logs(reward=None, frac_reward_zero_std=0.0)
    for undefined in (logs, [without(log, "reward") for log in logs]):
        (finding,) = examine(undefined)
        assert (finding.name, finding.sentence) == ("No reward", "undefined in all 20 logs.")
    assert [finding.severity for finding in examine(made_logs(reward=[None, 0.5]))] == ["healthy"]
    some = [log if log["step"] % 2 else without(log, "reward", "completions/mean_length") for log in made_logs()]
    assert [finding.severity for finding in examine(some)] == ["healthy"]  # generations at every second update


def test_updates_that_train_nothing_are_told_as_such():
    """Their log has no entropy, so that the entropy did not fall."""
    of_tokens = [name for name in HEALTHY if name.startswith(("bapo/", "ratio/", "staleness/", "clip", "entropy"))]
    trained = made_logs(18, **{"bapo/masked_share": [0.5, 0.1]})
    masked = [without(log, *of_tokens) | {"bapo/masked_share": 1.0} for log in made_logs(2, first=19)]
    (finding,) = examine(trained + masked)
    assert (finding.severity, finding.name) == ("warning", "Masked rows")  # in 2 of 20: a tenth of the logs
    assert finding.sentence == "`bapo/masked_share` above 0.5 in 2 of 20 logs; highest 1 at update 19."
    assert [finding.name for finding in examine(trained)] == ["Healthy"]  # one log has a half, not more


def test_checks_that_could_not_be_made_are_named():
    plain = [{"loss": 0.1, "step": step, "entropy": 1.0} for step in (1, 2)]
    (finding,) = examine(plain)
    assert finding.severity == "healthy"
    assert finding.sentence == (
        "1 of 7 checks made on 2 logs, and none found anything. Not checked, because not logged: Mean ratio "
        "(`ratio/mean`), Effective sample size (`ratio/ess`), Chi-square divergence (`ratio/chi2`), Target share "
        "missed (`bapo/target_met`), Groups without signal (`frac_reward_zero_std`), Completions cut off "
        "(`completions/clipped_ratio`)."
    )
    found, rest = examine([{**log, "ratio/ess": 0.1} for log in plain])
    assert (found.name, rest.name, rest.severity) == ("Effective sample size", "Not checked", "note")
    (nothing,) = examine([{"loss": 0.1, "step": 1}])
    assert nothing.severity == "note"
    assert nothing.sentence.count("(`") == 7


def test_settings_that_a_line_names_exist():
    """What to try is worth nothing if there is no such setting."""
    from bapo_trl import BAPOConfig

    words = [word for check in CHECKS for word in re.findall(r"`([^`]+)`", check.meaning + str(check.remedies))]
    assert {word for word in words if word not in HEALTHY and not hasattr(BAPOConfig, word)} <= {"sampling/"}


def test_the_page_of_the_docs_has_the_lines():
    page = (ROOT / "docs" / "report.md").read_text()
    rows = "\n".join(
        f"| {check.name} | {check.rule} | {check.meaning} | {' '.join(remedy.sentence for remedy in check.remedies)} |"
        for check in CHECKS
    )
    assert rows in page, f"the table of health lines is to be that of bapo_trl/report/health.py:\n{rows}"
