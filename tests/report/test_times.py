"""Where the time of a run went, in the report's last line and in its figure."""

import pytest

from bapo_trl.report.runs import Logs
from bapo_trl.report.times import PHASES, largest_savings, seconds_of, time_line
from tests.report.made_logs import made_logs


def times(**seconds):
    return {f"time/{name}": seconds.get(name, 0.0) for name in PHASES}


def test_the_seconds_are_those_of_all_updates_of_a_log_line():
    logs = Logs(
        [{"step": 4, "loss": 0.1, **times(training=2)}, {"step": 10, "loss": 0.1, **times(training=1, other=3)}]
    )
    assert seconds_of(logs) == {**dict.fromkeys(PHASES, 0.0), "training": 14, "other": 18}


@pytest.mark.parametrize(
    ("facts", "savings"),
    [
        ({}, {}),
        ({"can_overlap": True}, {"overlap_generation": 40}),
        ({"can_use_sampler_logps": True, "can_overlap": True}, {"overlap_generation": 40, "use_sampler_logps": 10}),
    ],
)
def test_what_a_setting_could_save_is_at_most_what_was_measured(facts, savings):
    seconds = {**dict.fromkeys(PHASES, 0.0), "generation": 60, "training": 30, "scoring": 10}
    assert largest_savings(seconds, facts) == savings
    seconds |= {"generation": 20, "training": 70}
    if "can_overlap" in facts:
        assert largest_savings(seconds, facts)["overlap_generation"] == 20


def test_the_line_names_the_largest_part_first():
    logs = Logs(made_logs(**times(generation=5, training=4, scoring=1)))
    line = time_line(logs, {"can_overlap": True})
    assert line == (
        "Time: 20 updates took 200 s, without evaluations and saves: generation 50%, training 40%, scoring 10%. The "
        "most that a setting could save: overlap_generation 50%."
    )
    assert time_line(Logs([{"step": 1, "loss": 0.1}]), {}) == ""
