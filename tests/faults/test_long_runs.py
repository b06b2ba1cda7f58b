"""A long run holds what a short one holds, and takes no longer for an update."""

import json
import sys
from statistics import median

import pytest

from tests.helpers.commands import run_command, succeeded
from tests.helpers.fault_counts import CPU_LIMIT, cases
from tests.helpers.slopes import growth


EVEN = ("open files", "threads", "hooks", "rows in the queue", "groups in the pool")


@pytest.mark.processes
@pytest.mark.trainings
def test_a_long_run_does_not_grow(tmp_path):
    updates = cases(3000)
    command = [sys.executable, "-m", "tests.helpers.long_run", str(tmp_path), str(updates)]
    succeeded(run_command(command, timeout_s=1800))
    lines = [json.loads(line) for line in (tmp_path / "measurements.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == list(range(1, updates + 1))
    warm = lines[updates // 5 :]
    for name in EVEN:
        assert abs(growth([line[name] for line in warm])) < 0.05 * max(1, median(line[name] for line in warm)), name
    for name, limit in {"memory": 0.05, "CPU seconds": CPU_LIMIT}.items():
        values = [line[name] for line in warm]
        assert growth(values) < limit * median(values), name
