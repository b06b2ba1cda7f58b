"""Tables and verdicts of invented runs."""

import csv
import math

from hypothesis import given
from hypothesis import strategies as st

from bapo_trl.compare.results import Row
from bapo_trl.compare.statistics import differences
from bapo_trl.compare.tables import as_csv, as_markdown, at_ends_of_grid, compare, verdict


def runs(arm, finals, over=None, **figures):
    return [Row(arm, over or {}, seed, final=final, **figures) for seed, final in enumerate(finals)]


def test_a_table_has_means_intervals_and_paired_differences():
    rows = [
        *runs("GRPO", [0.5, 0.6, 0.7], curve=[(0, 0.1), (4, 0.2), (8, 0.5)], area=0.3, fall=0.25, pass_at_k=0.75),
        *runs("BAPO", [0.6, 0.7, 0.85], area=0.4, gradient_peak=3.0),
    ]
    text = as_markdown(compare(rows, ["GRPO", "BAPO"], "GRPO"))
    # t(2) is 4.3027: * 0.1 / sqrt(3) = 0.248; of the differences 0.1, 0.1, 0.15: * 0.02887 / sqrt(3) = 0.072
    assert "| GRPO | 3     | 0.600 ± 0.248  | 0.300 | 0.750  | 0.250      |" in text
    assert "| BAPO | +0.117 ± 0.072 | 0.020    | 3 of 3      |" in text
    assert "- BAPO above GRPO on 3 of 3 seeds." in text
    assert "| BAPO | 3     | 3.0           |" in text


def test_runs_that_were_measured_before_and_after_alone_have_no_course():
    rows = runs("A", [0.5, 0.6], curve=[(0, 0.1), (8, 0.5)], area=0.3, fall=0.0)
    text = as_markdown(compare(rows, ["A"], "A"))
    assert "final accuracy" in text
    assert "area" not in text
    assert "worst fall" not in text


def test_a_failed_run_is_a_line_and_does_not_count():
    rows = [*runs("A", [0.5, 0.6]), *runs("B", [0.4, 0.7]), Row("B", {}, 7, error="exit code 1: nan (x.log)")]
    text = as_markdown(compare(rows, ["A", "B"], "A"))
    assert "- B, seed 7, failed: exit code 1: nan (x.log)" in text
    assert "| B   | 2     |" in text


def test_a_name_with_a_bar_stays_in_its_cell():
    text = as_markdown(compare([*runs("a|b", [0.5, 0.6]), *runs("c", [0.4, 0.7])], ["a|b", "c"], "a|b"))
    assert "| a\\|b | 2     |" in text
    assert "above a\\|b" in text


def test_each_setting_has_a_table_of_its_own():
    rows = [*runs("A", [0.5], {"steps": 16}), *runs("A", [0.6], {"steps": 64}), *runs("B", [0.6], {"steps": 64})]
    comparisons = compare(rows, ["A", "B"], "A")
    assert [(each.over, list(each.arms)) for each in comparisons] == [
        ({"steps": 16}, ["A"]),
        ({"steps": 64}, ["A", "B"]),
    ]
    assert "## steps 16" in as_markdown(comparisons)
    assert verdict(comparisons[1]) == ["B and A: 1 seed tells no spread."]
    alike = compare([*runs("A", [0.5, 0.6]), *runs("B", [0.5, 0.6])], ["A", "B"], "A")
    assert verdict(alike[0]) == ["B and A end alike on all 2 seeds."]


def test_a_verdict_says_how_many_more_seeds_would_tell():
    rows = [*runs("A", [0.5, 0.5, 0.5, 0.5]), *runs("B", [0.52, 0.48, 0.53, 0.49])]
    (line,) = verdict(compare(rows, ["A", "B"], "A")[0])
    assert line.startswith("B and A cannot be told apart: about ")
    assert line.endswith(" more seeds would.")
    few = [*runs("A", [0.5, 0.5]), *runs("B", [0.53, 0.538])]
    assert verdict(compare(few, ["A", "B"], "A")[0]) == ["B and A cannot be told apart: about 1 more seed would."]


ACCURACY = st.floats(0, 1).map(lambda value: round(value, 3))


@given(
    st.dictionaries(
        st.sampled_from(["A", "B", "C", "D"]), st.lists(ACCURACY, min_size=1, max_size=6), min_size=2, max_size=4
    ),
    st.sampled_from(["A", "B"]),
)
def test_no_verdict_claims_an_order_whose_interval_holds_zero(finals, against):
    arms = sorted(finals)
    against = against if against in arms else arms[0]
    rows = [row for arm in arms for row in runs(arm, finals[arm])]
    (comparison,) = compare(rows, arms, against)
    pairs = len(arms) * (len(arms) - 1) // 2
    for line in verdict(comparison):
        if " above " not in line:
            continue
        above, _, rest = line.partition(" above ")
        below = rest.partition(" on ")[0]
        number = len(arms) - 1 if against in (above, below) else pairs
        (each,) = differences(comparison.finals, [(above, below)], number)
        assert each.mean.value - each.mean.half_width > 0
        assert f"{sum(value > 0 for value in each.values)} of {len(each.values)} seeds" in line


def test_a_learning_rate_at_an_end_of_the_grid_is_named():
    rows = []
    for rate, a, b in ((1e-4, 0.1, 0.1), (2e-4, 0.2, 0.5), (4e-4, 0.3, 0.4)):
        rows += [*runs("A", [a], {"learning_rate": rate}), *runs("B", [b], {"learning_rate": rate})]
    assert at_ends_of_grid(compare(rows, ["A", "B"], "A")) == [
        "A is best at learning_rate 0.0004, an end of the grid: try rates beyond it."
    ]


def test_csv_has_each_figure_in_a_line():
    rows = [*runs("A", [0.5, 0.6], {"steps": 16}, seconds=3.0), *runs("B", [0.7, 0.9], {"steps": 16})]
    found = {tuple(line[:3]): line[3:] for line in csv.reader(as_csv(compare(rows, ["A", "B"], "A")).splitlines()[1:])}
    assert found["steps 16", "A", "final accuracy"][:2] == ["2", "0.55"]
    assert math.isclose(float(found["steps 16", "B", "final accuracy above A (Bonferroni)"][1]), 0.25)
    assert found["steps 16", "A", "seconds"] == ["2", "3", ""]
