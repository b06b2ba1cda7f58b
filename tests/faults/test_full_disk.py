"""A disk that is full while a checkpoint is saved: the error says so, the one before is complete, the run goes on."""

import errno
import json
import os
import shutil
import sys

import pytest

from bapo_trl.checkpoints.files import UNFINISHED, find_defect
from tests.helpers.commands import run_command, succeeded
from tests.helpers.toy import toy_trainer
from tests.replay.test_mixer import REPLAY


pytestmark = pytest.mark.processes


SAVING = {**REPLAY, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
NAMESPACE = ["unshare", "--map-root-user", "--mount"]
EXPLAINED = (
    r"No space left on device\ncheckpoint-4 could not be saved in {folder}, where [\d,]+ MB of [\d,]+ MB are free\. "
    r"If the disk is full, make room, for one checkpoint more than `save_total_limit`\. checkpoint-2, saved before, "
    r"is complete\. Resume with `resume_from_checkpoint=True`"
)


def test_a_flush_that_finds_no_room_is_a_save_that_failed(tmp_path, monkeypatch):
    fsync = os.fsync

    def full(descriptor):
        if "checkpoint-4" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=EXPLAINED.format(folder=tmp_path)):
        toy_trainer(tmp_path, **SAVING).train()
    assert find_defect(tmp_path / "checkpoint-2") is None


def test_without_a_checkpoint_before_the_error_says_so(tmp_path, monkeypatch):
    def full(content, path, *args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr("torch.save", full)
    with pytest.raises(OSError, match=r"\ncheckpoint-2 could not .*No checkpoint is there to resume from"):
        toy_trainer(tmp_path, **SAVING).train()


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
