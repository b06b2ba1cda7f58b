"""Tables and verdicts of invented runs."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from bapo_trl.compare.results import Row
from bapo_trl.compare.statistics import differences
from bapo_trl.compare.tables import as_markdown, compare, verdict


def runs(arm, finals, sweep=None, **figures):
    return [Row(arm, sweep or {}, seed, final=final, **figures) for seed, final in enumerate(finals)]


def test_a_table_has_means_intervals_and_paired_differences():
    rows = [
        *runs("GRPO", [0.5, 0.6, 0.7], mean_accuracy=0.3, max_drawdown=0.25, pass_at_k=0.75),
        *runs("BAPO", [0.6, 0.7, 0.85], mean_accuracy=0.4, gradient_peak=3.0),
    ]
    text = as_markdown(compare(rows, ["GRPO", "BAPO"], "GRPO"))
    # t(2) is 4.3027: * 0.1 / sqrt(3) = 0.248; of the differences 0.1, 0.1, 0.15: * 0.02887 / sqrt(3) = 0.072
    assert "| GRPO   | 3     | 0.600 ± 0.248  | 0.300         | 0.750  | 0.250        |" in text
    assert "| BAPO   | 3            | 0.717            | 0.600        | +0.117 ± 0.072 | 0.020    | 3 of 3 " in text
    assert "- BAPO reached a higher accuracy than GRPO on 3 of 3 seeds." in text
    assert "| BAPO   | 3     | 3.0           |" in text


def test_a_difference_is_over_the_seeds_that_both_have_and_equals_that_of_the_accuracies_beside_it():
    rows = [*runs("GRPO", [0.5, 0.6, 0.7, 0.9]), *runs("BAPO", [0.6, 0.65])]
    text = as_markdown(compare(rows, ["GRPO", "BAPO"], "GRPO"))
    assert "| GRPO   | 4     | 0.675" in text
    assert "| BAPO   | 2            | 0.625            | 0.550        | +0.075 ± " in text


def test_a_failed_run_is_a_line_and_does_not_count():
    rows = [*runs("A", [0.5, 0.6]), *runs("B", [0.4, 0.7]), Row("B", {}, 7, error="exit code 1: nan (x.log)")]
    text = as_markdown(compare(rows, ["A", "B"], "A"))
    assert "- B, seed 7, failed: exit code 1: nan (x.log)" in text
    assert "| B      | 2     |" in text


ACCURACY = st.floats(0, 1).map(lambda value: round(value, 3))


@given(
    st.dictionaries(
        st.sampled_from(["A", "B", "C", "D"]), st.lists(ACCURACY, min_size=1, max_size=6), min_size=2, max_size=4
    ),
    st.sampled_from(["A", "B"]),
)
def test_no_verdict_claims_an_order_whose_interval_holds_zero(finals, baseline):
    arms = sorted(finals)
    baseline = baseline if baseline in arms else arms[0]
    rows = [row for arm in arms for row in runs(arm, finals[arm])]
    (comparison,) = compare(rows, arms, baseline)
    pairs = list(combinations(arms, 2))
    for line in verdict(comparison):
        if " reached a higher accuracy than " not in line:
            continue
        above, _, rest = line.partition(" reached a higher accuracy than ")
        below = rest.partition(" on ")[0]
        family = [(arm, baseline) for arm in arms if arm != baseline] if baseline in (above, below) else pairs
        found = differences(comparison.finals, family)
        (each,) = (each for each in found if {each.arm, each.baseline} == {above, below})
        assert each.mean.excludes_zero
        assert (each.mean.value > 0) == (each.arm == above)
        on = sum((value > 0) == (each.arm == above) and value != 0 for value in each.values)
        assert f"{on} of {len(each.values)} seeds" in line
