"""A disk that is full while a checkpoint is saved: the error says so, the one before is complete, the run goes on."""

import shutil
import sys

import pytest

from tests.helpers.commands import run_command, succeeded


pytestmark = pytest.mark.processes


NAMESPACE = ["unshare", "--map-root-user", "--mount"]


def test_on_a_disk_that_is_full_all_ranks_stop_and_go_on_once_there_is_room(tmp_path):
    mounts = [*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]
    if shutil.which("unshare") is None or run_command(mounts).returncode != 0:
        pytest.skip("this machine lets no process mount a disk of its own: unshare --map-root-user --mount")
    printed = succeeded(run_command([*NAMESPACE, sys.executable, "-m", "tests.helpers.full_disk", str(tmp_path)]))
    assert printed == "1 ranks\n2 ranks\n"
