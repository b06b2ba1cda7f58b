"""Golden tests of each health line: it appears just beyond its threshold, and not within."""

import pytest

from bapo_trl.report import health
from bapo_trl.report.health import Finding
from bapo_trl.report.runs import Logs
from tests.report.made_logs import made_logs


FACTS = {"has_clip_bounds": True}
ADAPTIVE = {**FACTS, "start_bounds": [0.6, 1.2]}
WITHIN = {"ratio/min": 0.6, "ratio/max": 1.2, "bapo/positive_share": 0.4}  # as the initial share


def examine(logs: list[dict], facts=FACTS, results=None) -> list[Finding]:
    return health.examine(Logs(logs), facts, results)


def lines(facts=FACTS, **changes) -> list[tuple[str, str]]:
    return told(examine(made_logs(**changes), facts))


def told(findings: list[Finding]) -> list[tuple[str, str]]:
    """Return findings without the summary, which is the first one."""
    assert findings[0].severity == "summary"
    assert {found.severity for found in findings[1:]} <= {"warning"}
    return [(found.name, found.sentence) for found in findings[1:]]


def evaluated(accuracies: dict[int, float], name="eval_reward", **more) -> list[dict]:
    """Return logs of 20 updates with evaluations between them."""
    logs = [
        *made_logs(),
        *({"step": step, "eval_reward": 0.5, name: value, **more} for step, value in accuracies.items()),
    ]
    return sorted(logs, key=lambda log: log["step"])


GOLDEN = [
    # metric, values just within, values just beyond, name, sentence
    ("reward", [None, 0.5], None, "No reward", "undefined in all 20 logs."),
    ("ratio/ess", 0.3, 0.299, "Effective sample size",
     "below 0.3 of the samples in 20 of 20 logs; lowest 0.299 at update 1."),
    # 1 of 20: not often; 2 are
    ("ratio/ess", [0.1, 0.9], [0.9, 0.1, 0.2, 0.9], "Effective sample size",
     "below 0.3 of the samples in 2 of 20 logs; lowest 0.1 at update 2."),
    # the latest 5 of 20 logs count: 15 of another value before do not
    ("frac_reward_zero_std", [1.0] * 15 + [0.7], [0.0] * 15 + [0.71], "Zero-advantage groups",
     "71% of the completions are in groups whose rewards are all equal, in the latest 5 of 20 logs."),
    ("completions/clipped_ratio", [1.0] * 15 + [0.5], [0.0] * 15 + [0.51], "Completions cut off",
     "51% of the completions reached the maximum length, in the latest 5 of 20 logs."),
]  # fmt: skip


@pytest.mark.parametrize(("metric", "within", "beyond", "name", "sentence"), GOLDEN)
def test_each_line_at_its_threshold(metric, within, beyond, name, sentence):
    assert lines(**{metric: within}) == []
    assert lines(**{metric: beyond}) == [(name, sentence)]
    assert examine(made_logs(**{metric: beyond}))[0].sentence.startswith("3/4 passed.")


@pytest.mark.parametrize("name", ["eval_reward", "eval_avg@4"])
def test_a_fall_of_the_accuracy_by_a_third_is_told(name):
    def falls(accuracies, **more):
        return told(examine(evaluated(accuracies, name, **more)))

    assert falls({5: 0.3, 10: 0.6, 15: 0.41, 20: 0.41}) == []
    assert falls({5: 0.3, 10: 0.6, 15: 0.4}) == [
        ("Accuracy fell", "fell from 0.600 at update 10 to 0.400 at update 15.")
    ]
    recovered = falls({5: 0.6, 10: 0.2, 15: 0.7, 20: 0.66})
    assert recovered == [("Accuracy fell", "fell from 0.600 at update 5 to 0.200 at update 10; 0.660 at update 20.")]
    assert falls({10: 0.0, 20: 0.0}) == []
    if name == "eval_avg@4":  # 0.01 is within the noise of both evaluations
        assert falls({10: 0.02, 20: 0.01}, **{"eval_avg@4_stderr": 0.01}) == []
    else:  # a third of such a reward is no measure
        assert falls({5: -0.5, 10: 0.1, 20: 0.05}) == []


def test_bounds_without_an_effect_are_told():
    def named(facts=ADAPTIVE, **changes):
        return [name for name, _ in lines(facts, **{**WITHIN, **changes})]

    assert named() == ["Effect of the clip bounds"]
    assert lines(ADAPTIVE, **WITHIN)[0][1] == "none in 20 of 20 logs: all ratios lie within 0.6 to 1.2."
    assert named(FACTS) == []  # fixed bounds
    assert named(**{"ratio/max": [1.0] * 19 + [1.21]}) == []
    assert named(**{"ratio/min": [0.59, 1.0]}) == []
    assert named(**{"bapo/positive_share": [0.4] * 10 + [0.41]}) == []
    assert named(**{"bapo/positive_share": 0.4 + 1e-7}) == ["Effect of the clip bounds"]  # in float32
    assert named(**{"bapo/clip_low": 0.9, "bapo/clip_high": 3.0}) == ["Effect of the clip bounds"]  # a search in vain


def test_checks_that_could_not_be_made_are_named():
    plain = [{"loss": 0.1, "step": step, "ratio/ess": 0.9} for step in (1, 2)]
    plain[0]["frac_reward_zero_std"] = 0.1
    (finding,) = examine(plain)
    assert finding.severity == "summary"
    assert finding.sentence == (
        "1/1 passed. Not checked, because not logged: `reward`, `eval_reward`, `completions/clipped_ratio`. Not "
        "checked, because logged once, which may be noise: `frac_reward_zero_std`."
    )
    summary, found = examine([{**log, "ratio/ess": 0.1} for log in plain])
    assert (summary.sentence[:12], found.name) == ("0/1 passed. ", "Effective sample size")
