"""docs/algorithm.md: its table of staleness and its picture say what the trainer does."""

import re
import runpy

import pytest

from bapo_trl import BAPOConfig
from tests.helpers.commands import ROOT


PAGE = (ROOT / "docs" / "algorithm.md").read_text()


def test_the_table_of_staleness_is_that_of_the_settings(tmp_path):
    rows = [[int(n) for n in re.findall(r"\d+", line)] for line in PAGE.splitlines() if re.match(r"\| \d", line)]
    assert len(rows) == 4
    for accumulation, steps, passes, updates, staleness in rows:
        args = BAPOConfig(
            str(tmp_path), use_cpu=True, bf16=False, gradient_accumulation_steps=accumulation,
            steps_per_generation=steps, num_iterations=passes,
        )  # fmt: skip
        assert (args.updates_per_generation, args.largest_staleness) == (updates, staleness)


@pytest.mark.trainings
def test_the_picture_is_of_what_a_run_logs():
    picture = runpy.run_path(str(ROOT / "docs" / "tools" / "draw_staleness.py"))
    default, steps, passes, replayed, rested, partial = picture["PANELS"].values()
    staleness = picture["staleness"]
    assert staleness(default, 3) == [(0, 0)] * 3
    assert staleness(steps, 6) == [(age, age) for age in (0, 1, 2, 3, 0, 1)]
    assert staleness(passes, 10) == [(age, age) for age in (0, 1, 2, 3, 4, 5, 6, 7, 0, 1)]
    # Half of each batch is of the generation before, shuffled over the updates
    ages = staleness(replayed, 16)
    assert ages[:4] == [(age, age) for age in (0, 1, 2, 3)]
    assert [largest for _, largest in ages[4:]] == [4, 5, 6, 7] * 3
    assert [sum(mean for mean, _ in ages[start : start + 4]) / 4 for start in (4, 8, 12)] == pytest.approx([3.5] * 3)
    # 4 updates a generation: a row of at least 8 rests for two generations, and is up to 3 older at its last update
    assert staleness(rested, 32)[16:] == [(age, age) for age in (8, 9, 10, 11)] * 4
    ages = staleness(partial, 16)
    assert ages[:4] == [(age, age) for age in (0, 1, 2, 3)]
    assert max(largest for _, largest in ages) >= 7  # 2 U - 1
    assert all(age % 4 <= mean < largest for age, (mean, largest) in list(enumerate(ages))[8:] if largest > 3)
