"""A disk that is full while a checkpoint is saved: the error says so, the one before is whole, the run goes on."""

import builtins
import errno
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from bapo_trl.checkpoints.files import MANIFEST, find_defect
from bapo_trl.checkpoints.whole import UNFINISHED
from tests.helpers.commands import run_command, succeeded
from tests.helpers.forked import run_python
from tests.helpers.save_events import names
from tests.helpers.toy import toy_trainer
from tests.replay.test_mixer import REPLAY


pytestmark = pytest.mark.processes


SAVING = {**REPLAY, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
NAMESPACE = ["unshare", "--map-root-user", "--mount"]
EXPLAINED = (
    r"checkpoint-4 could not be saved in {folder}, where [\d,]+ MB of [\d,]+ MB are free: .*No space left on device.*"
    r"\. If the disk is full, make room, for one checkpoint more than `save_total_limit`\. checkpoint-2, saved "
    r"before, is whole\. Resume with `resume_from_checkpoint=True`"
)


@pytest.fixture(scope="module")
def saved_files(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("saved")
    toy_trainer(folder, **SAVING).train()
    files = json.loads((folder / "checkpoint-4" / MANIFEST).read_text())
    return [*sorted(files.keys() - {"tokenizer.json"}), MANIFEST]  # that one is written past Python


@pytest.fixture
def fill_up(monkeypatch):
    """Return a function that lets every write of files of a name fail, whoever writes; `None` for no file."""
    full_for = [None]

    def watch(owner, name, path_of):
        write = getattr(owner, name)

        def watched(*args, **kwargs):
            path = path_of(*args, **kwargs)
            is_saved = isinstance(path, str | os.PathLike) and UNFINISHED in str(path)
            if is_saved and os.path.basename(path) == full_for[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return write(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    watch(torch, "save", lambda content, path, *args, **kwargs: path)
    watch(safetensors.torch, "serialize_file", lambda content, path, *args, **kwargs: path)
    watch(builtins, "open", lambda path, mode="r", *args, **kwargs: path if set(mode) & set("wax+") else None)
    watch(Path, "write_text", lambda path, *args, **kwargs: path)
    return lambda file: full_for.__setitem__(0, file)


def test_whichever_file_finds_no_room_the_checkpoint_before_is_whole(tmp_path, fill_up, saved_files):
    assert len(saved_files) >= 10
    for number, file in enumerate(saved_files):
        folder = tmp_path / str(number)
        fill_up(None)
        toy_trainer(folder, **{**SAVING, "max_steps": 2}).train()
        fill_up(file)
        trainer = toy_trainer(folder, **SAVING)
        with pytest.raises(OSError, match=EXPLAINED.format(folder=folder)):
            trainer.train(resume_from_checkpoint=True)
        assert find_defect(folder / "checkpoint-2") is None
        assert names(folder) == {"checkpoint-2", UNFINISHED}


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


def test_without_a_checkpoint_before_the_error_says_so(tmp_path, fill_up):
    fill_up("optimizer.pt")
    with pytest.raises(OSError, match=r"checkpoint-2 could not .*No checkpoint is there to resume from"):
        toy_trainer(tmp_path, **SAVING).train()


def test_a_push_that_finds_no_room_ends_both_ranks_and_the_checkpoint_is_whole(tmp_path):
    succeeded(run_python(["-m", "tests.helpers.bad_input_worker", tmp_path, "push"], ranks=2, timeout_s=120))
    message = (
        r"OSError: checkpoint-1 could not be pushed from .*/out, where [\d,]+ MB of [\d,]+ MB are free: .*No space "
        r"left on device\..* and a copy of the weights\. checkpoint-1, saved before, is whole\. Resume with"
    )
    for rank in range(2):
        assert re.match(message, (tmp_path / f"{rank}.txt").read_text())
    assert find_defect(tmp_path / "out" / "checkpoint-1") is None


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
            assert "checkpoint-2, saved before, is whole" in rank["error"]
        assert outcome["left"] == [UNFINISHED, "checkpoint-2"]
        assert outcome["defect"] is None
        assert outcome["resumed"] == [{"start": 2, "error": None}] * outcome["ranks"]
        assert outcome["is_as_uninterrupted"]
