"""A disk that is full while a checkpoint is saved: the error says so, the one before is complete, the run goes on."""

import json
import shutil
import sys

import pytest

from bapo_trl.checkpoints.files import UNFINISHED
from tests.helpers.commands import run_command, succeeded


pytestmark = pytest.mark.processes


NAMESPACE = ["unshare", "--map-root-user", "--mount"]


def test_on_a_disk_that_is_full_all_ranks_stop_and_go_on_once_there_is_room(tmp_path):
    mounts = [*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]
    if shutil.which("unshare") is None or run_command(mounts).returncode != 0:
        pytest.skip("this machine lets no process mount a disk of its own: unshare --map-root-user --mount")
    printed = succeeded(run_command([*NAMESPACE, sys.executable, "-m", "tests.helpers.full_disk", str(tmp_path)]))
    outcomes = [json.loads(line) for line in printed.splitlines()]
    assert [outcome["ranks"] for outcome in outcomes] == [1, 2]
    for outcome in outcomes:
        assert len(outcome["stopped"]) == outcome["ranks"]
        for rank in outcome["stopped"]:
            assert "checkpoint-4 could not be saved in" in rank["error"]
            assert ", where 0 MB of " in rank["error"]
            assert "checkpoint-2, saved before, is complete" in rank["error"]
        assert outcome["left"] == [UNFINISHED, "checkpoint-2"]
        assert outcome["defect"] is None
        assert outcome["resumed"] == [{"start": 2, "error": None}] * outcome["ranks"]
        assert outcome["is_as_uninterrupted"]
