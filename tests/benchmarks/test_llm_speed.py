"""The benchmark of the chat model on a CPU: its rows of invented seconds."""

from benchmarks import llm_speed


def test_ratios_of_speed_are_of_pairs():
    measured = {"all": [(18, 2), (25, 5), (20, 0)], "none": [(50, 10), (70, 20), (30, 10)]}
    seconds = {
        arm: [{"user": user, "system": system, "peak_gb": 3.0} for user, system in runs]
        for arm, runs in measured.items()
    }
    rows = [llm_speed.to_row(arm, seconds) for arm in seconds]
    assert rows[1]["ratio"]["median"] == 3  # of 60/20, 90/30, 40/20
    assert (rows[0]["seconds"]["median"], rows[0]["system"]) == (20, 2)
