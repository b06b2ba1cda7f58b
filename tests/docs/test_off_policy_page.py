"""docs/algorithm.md: its table of staleness is that of the settings."""

import re

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
