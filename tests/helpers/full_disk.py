"""Saves onto a disk that is full, on one rank and on two, makes room and goes on.

    unshare --map-root-user --mount python -m tests.helpers.full_disk FOLDER

The disk is a file system in memory, mounted in a namespace of this process, which takes no privileges.
"""

import subprocess
import sys
from pathlib import Path

from bapo_trl.checkpoints.files import UNFINISHED, find_defect
from tests.helpers.save_events import names
from tests.helpers.save_kills import Run, in_processes, state_of
from tests.helpers.toy import toy_trainer
from tests.replay.test_mixer import REPLAY


STEPS = 2


def mount(folder: Path, size: int, *options: str) -> None:
    command = ["mount", "-t", "tmpfs", "-o", ",".join([*options, f"size={size}"]), "tmpfs", str(folder)]
    subprocess.run(command, check=True)


def trained(run: Run, folder: Path, resume: bool) -> dict:
    try:
        return run.train(folder, resume)
    except Exception as error:  # whichever library writes
        return {"error": "\n".join([str(error), *getattr(error, "__notes__", ())])}


def check(run: Run, folder: Path) -> None:
    """Fill the disk, make room, resume."""
    logs, straight, disk = (folder / name for name in ("logs", "straight", "stopped!"))  # names of one length
    for each in (logs, straight, disk):
        each.mkdir(parents=True)

    def trained_ranks(where: Path, resume: bool = False) -> list[dict]:
        return in_processes(run.ranks, logs, lambda rank: trained(run, where / "run", resume))

    trained_ranks(straight)
    last = straight / "run" / f"checkpoint-{run.max_steps}"
    size = sum(file.stat().st_size for file in last.rglob("*") if file.is_file())
    mount(disk, int(1.6 * size))  # a checkpoint and a part of the next
    for rank in trained_ranks(disk):
        assert "checkpoint-4 could not be saved in" in rank["error"]
        assert ", where 0 MB of " in rank["error"]
        assert "checkpoint-2, saved before, is complete" in rank["error"]
    assert names(disk / "run") == {UNFINISHED, "checkpoint-2"}
    assert find_defect(disk / "run" / "checkpoint-2") is None
    mount(disk, 4 * size, "remount")
    assert [rank.get("start") for rank in trained_ranks(disk, resume=True)] == [2] * run.ranks
    assert state_of(disk / "run" / last.name) == state_of(last)


def main(folder: str) -> None:
    for ranks in (1, 2):
        check(Run(ranks, toy_trainer, REPLAY, STEPS, []), Path(folder, f"ranks-{ranks}"))
        print(f"{ranks} ranks", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
