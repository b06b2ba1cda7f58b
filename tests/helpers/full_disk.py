"""Saves onto a disk that is full, on one rank and on two, makes room and goes on.

    unshare --map-root-user --mount python -m tests.helpers.full_disk FOLDER

The disk is a file system in memory, mounted in a namespace of this process, which takes no privileges. For each number
of ranks, a JSON line on the standard output tells what came of it.
"""

import json
import subprocess
import sys
from pathlib import Path

from bapo_trl.checkpoints.files import find_defect
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


def outcome(run: Run, folder: Path) -> dict:
    """Fill the disk, make room, resume; return what came of it."""
    logs, straight, disk = (folder / name for name in ("logs", "straight", "stopped!"))  # names of one length
    for each in (logs, straight, disk):
        each.mkdir(parents=True)

    def trained_ranks(where: Path, resume: bool = False) -> list[dict]:
        return in_processes(run.ranks, logs, lambda rank: trained(run, where / "run", resume))

    trained_ranks(straight)
    last = straight / "run" / f"checkpoint-{run.max_steps}"
    size = sum(file.stat().st_size for file in last.rglob("*") if file.is_file())
    mount(disk, int(1.6 * size))  # a checkpoint and a part of the next
    stopped = trained_ranks(disk)
    left = sorted(names(disk / "run"))
    defect = find_defect(disk / "run" / f"checkpoint-{STEPS}")
    mount(disk, 4 * size, "remount")
    resumed = trained_ranks(disk, resume=True)
    return {
        "ranks": run.ranks,
        "stopped": stopped,
        "left": left,
        "defect": defect,
        "resumed": [{"start": each.get("start"), "error": each.get("error")} for each in resumed],
        "is_as_uninterrupted": state_of(disk / "run" / last.name) == state_of(last),
    }


def main(folder: str) -> None:
    for ranks in (1, 2):
        run = Run(ranks, toy_trainer, REPLAY, STEPS, [])
        print(json.dumps(outcome(run, Path(folder, f"ranks-{ranks}"))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
