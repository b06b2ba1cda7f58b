"""A long run holds what a short one holds, and takes no longer for an update."""

import sys

import pytest

from tests.helpers.commands import run_command, succeeded
from tests.helpers.fault_counts import cases
from tests.helpers.long_run import assert_nothing_grows


@pytest.mark.processes
@pytest.mark.trainings
def test_a_long_run_does_not_grow(tmp_path):
    updates = cases(3000)
    command = [sys.executable, "-m", "tests.helpers.long_run", str(tmp_path), str(updates)]
    succeeded(run_command(command, timeout_s=1800))
    assert_nothing_grows(tmp_path / "measurements.jsonl", updates, updates // 5)
