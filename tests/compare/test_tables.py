"""Tables and verdicts of invented runs."""

from dataclasses import replace
from itertools import combinations

import numpy as np
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


def test_each_setting_has_a_table_of_its_own():
    rows = [*runs("A", [0.5], {"steps": 16}), *runs("A", [0.6], {"steps": 64}), *runs("B", [0.6], {"steps": 64})]
    comparisons = compare(rows, ["A", "B"], "A")
    assert [(each.sweep, list(each.arms)) for each in comparisons] == [
        ({"steps": 16}, ["A"]),
        ({"steps": 64}, ["A", "B"]),
    ]
    assert "## steps 16" in as_markdown(comparisons)
    assert verdict(comparisons[1]) == ["No significant difference between B and A on 1 seed: run at least 3."]
    alike = compare([*runs("A", [0.5, 0.6, 0.7]), *runs("B", [0.5, 0.6, 0.7])], ["A", "B"], "A")
    assert verdict(alike[0]) == ["No significant difference between B and A."]


def test_a_verdict_says_how_many_more_seeds_would_tell():
    rows = [*runs("A", [0.5, 0.5, 0.5, 0.5]), *runs("B", [0.52, 0.48, 0.53, 0.49])]
    (line,) = verdict(compare(rows, ["A", "B"], "A")[0])
    assert line.startswith("No significant difference between B and A: about ")
    assert line.endswith(" more seeds would show one of the measured size.")


def test_two_seeds_promise_nothing():
    """Their spread is a guess: differences of 0.03 and 0.038 would ask for 3 seeds, those of 0.1 and 0.4 for 32."""
    for finals in ([0.53, 0.538], [0.6, 0.9], [0.0, 0.624]):
        rows = [*runs("A", [0.5, 0.5]), *runs("B", finals)]
        comparisons = compare(rows, ["A", "B"], "A")
        assert verdict(comparisons[0]) == ["No significant difference between B and A on 2 seeds: run at least 3."]
        text = as_markdown(comparisons)
        paired = next(line for line in text.splitlines() if line.startswith("| B      | 2            |"))
        assert paired.split("|")[8].strip() == "-"  # seeds to show 0.03
        assert "more seed" not in text


def test_no_interval_is_wider_than_what_can_be_measured():
    # Two seeds: t(1) 12.706 * s / sqrt(2), where s is the difference over sqrt(2): 6.353 times the difference
    # of the seeds. An accuracy is in [0, 1], a width of 1: half of it is 0.5, so up to a difference of 0.0787.
    rows = [*runs("A", [0.5, 0.578]), *runs("B", [0.5, 0.58], gradient_peak=2.0, pass_at_k=0.5)]
    rows[3] = replace(rows[3], gradient_peak=4.0, pass_at_k=0.9)
    text = as_markdown(compare(rows, ["A", "B"], "A"))
    assert "0.539 ± 0.496" in text
    assert "| B      | 2     | 0.540          | 0.700  |" in text
    assert "3.0 ± 12.7" in text  # which has no end
    # Differences are in [-1, 1]: 6.353 * 0.3 is above 1, 6.353 * 0.15 is not
    for last, interval in ((0.8, ""), (0.65, " ± 0.953")):
        rows = [*runs("A", [0.5, 0.5]), *runs("B", [0.5, last])]
        paired = next(line for line in as_markdown(compare(rows, ["A", "B"], "A")).splitlines() if "| +" in line)
        assert paired.split("|")[5].strip() == f"+{(last - 0.5) / 2:.3f}{interval}"


def test_intervals_p_values_and_the_verdict_have_one_correction():
    rng = np.random.default_rng(3)
    gains = {"A": 0.0, "B": 0.0, "C": 0.015, "D": 0.03}
    for _ in range(30):
        finals = {arm: rng.normal(0.5 + gain, 0.01, 5).tolist() for arm, gain in gains.items()}
        rows = [row for arm, values in finals.items() for row in runs(arm, values)]
        (comparison,) = compare(rows, list(finals), "A")
        for each, line in zip(comparison.differences(), verdict(comparison), strict=False):
            is_claimed = "higher accuracy" in line
            assert is_claimed == each.mean.excludes_zero == (each.p_value < 0.05)


def test_start_accuracy_and_health_warnings_are_in_the_result():
    halved = {"Entropy halved": "fell from 1 at update 1 to 0.4 at update 9."}
    rows = [
        *runs("A", [0.5, 0.6], curve=[(0, 0.1), (8, 0.5)]),
        *runs("B", [0.5, 0.6], curve=[(0, 0.2), (8, 0.5)], warnings=halved),
    ]
    rows[2] = replace(rows[2], warnings={**halved, "Completions cut off": "51% of ..."})
    text = as_markdown(compare(rows, ["A", "B"], "A"))
    assert text.splitlines()[0].endswith("| start accuracy |")
    assert [line[-18:] for line in text.splitlines()[2:4]] == ["| 0.100          |", "| 0.200          |"]
    assert "- B, health warning: Entropy halved (seeds 0, 1)\n" in text
    assert "- B, health warning: Completions cut off (seed 0)\n" in text
    assert "A, health" not in text


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
