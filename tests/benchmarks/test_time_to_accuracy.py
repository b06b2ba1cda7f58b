"""The tables of the study of time to accuracy, on runs of which the answer is known."""

from types import SimpleNamespace

import pytest

from benchmarks import time_to_accuracy
from benchmarks.time_to_accuracy import at_equal_time, mean_until, phases_table


@pytest.mark.parametrize(
    ("end", "mean"),
    [(10, 0.2), (20, (0.2 * 10 + 0.45 * 10) / 20), (30, (0.2 * 10 + 0.45 * 20) / 30), (5, 0.15)],
)
def test_the_mean_of_a_curve_up_to_a_time(end, mean):
    curve = [(0.0, 0.1), (10.0, 0.3), (20.0, 0.6), (30.0, 0.3)]
    assert mean_until(curve, end) == pytest.approx(mean)


def made_run(arm, seed, curve, clock, seconds, **phases):
    costs = [{clock: each, "tokens": 1} for each in seconds]
    return SimpleNamespace(arm=arm, seed=seed, curve=curve, costs=costs, phases=phases)


def test_the_accuracies_after_equal_time_are_those_when_the_baseline_ends(monkeypatch):
    def run(arm, seed, seconds, accuracies):
        return made_run(arm, seed, list(enumerate(accuracies)), "wall", seconds)

    runs = [
        run("TRL, 5e-4", 0, [0, 30], [0.1, 0.5]),
        run("TRL, 5e-4", 1, [0, 60], [0.2, 0.4]),
        run("another method", 0, [0, 90], [0.1, 0.9]),
        run("recommendation", 0, [0, 20, 40], [0.1, 0.4, 0.8]),  # half of the way from 0.4 to 0.8 after 30 seconds
        run("recommendation", 1, [0, 20, 40], [0.2, 0.3, 0.7]),  # ends before TRL's
    ]
    monkeypatch.setattr(time_to_accuracy, "rows", lambda study: runs)
    found = at_equal_time("time_server_longer")
    assert found == {"TRL, 5e-4": {0: 0.5, 1: 0.4}, "recommendation": {0: pytest.approx(0.6), 1: 0.7}}


def test_what_took_the_time_of_a_method(monkeypatch):
    def run(arm, seed, seconds, **phases):
        return made_run(arm, seed, [(0, 0.0), (4, 0.6), (8, 0.6)], "cpu", seconds, weights=9.0, **phases)

    runs = [
        run("recipe", 0, [0, 60, 120], generation=10, scoring=20, training=30),
        run("TRL", 0, [0, 120, 240], generation=40, scoring=0, training=60),
        run("recipe", 1, [0, 120, 240], generation=20, scoring=20, training=50),
        run("TRL", 1, [0, 240, 480], generation=40, scoring=0, training=80),
    ]
    monkeypatch.setattr(time_to_accuracy, "rows", lambda study: runs)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in phases_table().splitlines()]
    # An accuracy of 0.5 at five sixths of the first 4 updates
    assert lines[2] == ["recipe", "50 / 100", "0.50", "-", "15", "20", "40"]
    assert lines[3] == ["TRL", "100 / 200", "-", "2.00", "40", "0", "70"]
