"""
An update of BAPOTrainer beside one of GRPOTrainer on a made-up accelerator: devices, reads by the host, copies, memory
and collectives. What kernels do, how fast, and in which numbers, it does not show.
"""

import json

import pytest
import torch

from tests.helpers.commands import ROOT
from tests.helpers.forked import run_python
from tests.rehearsal.accelerator import NAME
from tests.rehearsal.worker import CASES, SHAPES


PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
IS_PINNED = torch.__version__.partition("+")[0] == PINS["torch"]
pytestmark = [
    pytest.mark.rehearsal,
    pytest.mark.skipif(not IS_PINNED, reason="stands on private names of the pinned torch"),
]


def test_an_update_on_a_rehearsed_accelerator(tmp_path):
    """All in one test: the process that rehearses is dear. That it went through says that no devices are mixed."""
    result = run_python(["-m", "tests.rehearsal.worker", tmp_path / "found.json"], timeout_s=600)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    found = json.loads((tmp_path / "found.json").read_text())
    for case in CASES:
        the_host_reads_one_vector_and_one_number_more_and_copies_nothing(case, **found[case])
    samples_outlived_their_generation(found["replay"]["BAPO"]["rows"], found["partial rollouts"]["BAPO"]["rows"])
    for row in found["held"]:
        assert 0 < row["bytes"] <= 12 * row["tokens"], row  # between two micro-batches
        assert row["wide"] == [], row  # nothing with a dimension of the vocabulary
    assert len(found["held"]) == 3 * len(SHAPES)
    for scope, (long, short) in found["collectives"].items():
        assert long == short, scope  # ranks with samples of other lengths
        assert len(long) > 10
        assert {device for call in long for *_, device in call[1:]} == {NAME}, scope  # NCCL takes none of the CPU


def the_host_reads_one_vector_and_one_number_more_and_copies_nothing(case, GRPO, BAPO):
    # The vector is that of the log. The number is the norm of the gradient, finite before the optimizer's step
    more = [] if case == "evaluation" else ["last micro-batch", "step"]
    assert len(GRPO["reads"]) >= 4, case
    assert sorted(ours(BAPO["reads"])) == more, case
    assert len(BAPO["reads"]) == len(GRPO["reads"]) + len(more), case
    assert len(BAPO["copies"]) == len(GRPO["copies"]), case


def samples_outlived_their_generation(replayed, carried_over):
    assert replayed["drawn"] > 0
    assert len(replayed["versions"]) > 1
    assert carried_over["in_a_row"] > 1  # tokens of two versions


def ours(notes):
    return [phase for phase, line in notes if line.startswith("bapo_trl/")]
