"""The benchmark of the chat model on a CPU: its arms, and its rows of invented seconds."""

from benchmarks import llm_speed


def test_ratios_of_speed_are_of_pairs():
    seconds = {
        "all": [
            {"user": 18, "system": 2, "peak_gb": 3.0},
            {"user": 25, "system": 5, "peak_gb": 3.0},
            {"user": 20, "system": 0, "peak_gb": 3.0},
        ],
        "none": [
            {"user": 50, "system": 10, "peak_gb": 3.0},
            {"user": 70, "system": 20, "peak_gb": 3.0},
            {"user": 30, "system": 10, "peak_gb": 3.0},
        ],
    }
    rows = [llm_speed.to_row(arm, seconds) for arm in seconds]
    assert rows[1]["ratio"]["median"] == 3  # of 60/20, 90/30, 40/20
    assert (rows[0]["seconds"]["median"], rows[0]["system"]) == (20, 2)


def test_each_arm_of_the_speeds_leaves_one_measure_out():
    assert llm_speed.ARMS["none"] == set()
    for name in llm_speed.MEASURES:
        assert llm_speed.ARMS["all"] - llm_speed.ARMS[f"without {name}"] == {name}
