"""What a run took to an accuracy, and how methods compare by it."""

import math

import pytest
from scipy import stats

from bapo_trl.compare.results import Row, with_target
from bapo_trl.compare.study import Run
from bapo_trl.compare.tables import as_markdown, compare
from bapo_trl.compare.target import cost_to_target


@pytest.mark.parametrize(
    ("accuracies", "cost"),
    [
        ([0.1, 0.5, 0.9, 0.9], 15.0),  # on the line between the measurements at 10 and 20
        ([0.1, 0.7, 0.7], 10.0),
        ([0.8, 0.9], 0.0),  # at the start
        ([0.1, 0.8, 0.2, 0.8, 0.9], 10 * (2 + 5 / 6)),  # the first one does not hold
        ([0.1, 0.9], None),  # no measurement confirms it
        ([0.1, 0.9, 0.2], None),
        ([0.1, 0.9, 0.6, 0.9], None),
        ([0.1, 0.2, 0.3], None),
        ([0.9], None),
    ],
)
def test_the_target_is_reached_where_the_next_measurement_confirms_it(accuracies, cost):
    curve = [(10.0 * place, accuracy) for place, accuracy in enumerate(accuracies)]
    assert cost_to_target(curve, 0.7) == (None if cost is None else pytest.approx(cost))


def run(arm, seed, clock="wall", target=0.5):
    return Run(arm, {}, seed, {}, {}, target=target, clock=clock)


def row(arm, seed, pace, accuracies=(0.0, 0.4, 0.6, 0.8), clock="wall", target=0.5):
    """A run measured every ten updates, with so many seconds an update, twice the CPU seconds and 100 tokens."""
    curve = [(10 * place, accuracy) for place, accuracy in enumerate(accuracies)]
    costs = [{"wall": step * pace, "cpu": 2 * step * pace, "tokens": 100 * step} for step, _ in curve]
    row = Row(arm, {}, seed, curve=curve, costs=costs, final=accuracies[-1], seconds=999.0)
    return with_target(row, run(arm, seed, clock, target))


@pytest.mark.parametrize(("clock", "seconds"), [("wall", 45.0), ("cpu", 90.0)])
def test_a_row_has_what_the_run_took(clock, seconds):
    assert row("ours", 0, pace=3, clock=clock).to_target == {
        "target": 0.5, "clock": clock, "reached": True, "seconds": seconds, "tokens": 1500, "updates": 15
    }  # fmt: skip


def cells(rows, arm):
    text = as_markdown(compare(rows, ["trl", "ours"], "trl"))
    table = next(part for part in text.split("\n\n") if "reached" in part)
    line = next(line for line in table.splitlines() if line.startswith(f"| {arm} "))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_the_table_has_geometric_means_over_common_seeds_with_intervals():
    paces = {0: (4.0, 1.0), 1: (4.0, 2.0), 2: (6.0, 1.0)}
    rows = [
        row(arm, seed, pace) for seed, pair in paces.items() for arm, pace in zip(("trl", "ours"), pair, strict=True)
    ]
    rows.append(row("ours", 3, 50.0))  # which trl lacks
    logs = [math.log(ours / trl) for trl, ours in paces.values()]
    interval = stats.ttest_1samp(logs, 0).confidence_interval()
    expected = f"{math.exp(sum(logs) / 3):.2f} ({math.exp(interval.low):.2f} to {math.exp(interval.high):.2f})"
    assert cells(rows, "ours") == ["4 of 4", f"{15 * 54 / 4:,.0f}", expected, "1.00", "1.00"]
    assert cells(rows, "trl")[:3] == ["3 of 3", "70", "-"]


def test_a_run_that_misses_the_target_leaves_a_bound():
    low = (0.0, 0.1, 0.2, 0.3)
    both = [row("trl", 0, 2.0), row("trl", 1, 2.0)]
    missed = [row("ours", 0, 2.0), row("ours", 1, 2.0, low)]
    assert cells([*both, *missed], "ours")[:3] == ["1 of 2", "30", f"at least {math.sqrt(2):.2f}"]
    base_missed = [row("trl", 0, 2.0, low), row("trl", 1, 2.0, low), row("ours", 0, 2.0), row("ours", 1, 2.0)]
    assert cells(base_missed, "ours")[:3] == ["2 of 2", "30", "at most 0.50"]
    assert cells([*base_missed[:2], *missed], "ours")[2] == "unknown"
    assert cells(base_missed, "trl")[:2] == ["0 of 2", "-"]
