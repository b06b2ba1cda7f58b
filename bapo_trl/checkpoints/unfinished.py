"""The folders `_unfinished-ID` of a run: a checkpoint is written in one, and one that has to go is deleted in one."""

import contextlib
import os
import re
import shutil
import warnings
from pathlib import Path

from transformers.trainer_utils import sort_checkpoints

from .files import flush


UNFINISHED = "_unfinished"  # begin of the folder's name


def remove_left_behind(run_dir: str) -> None:
    """Delete what saves that did not end have left in the folder of a run, with a warning."""
    for folder in sorted(Path(run_dir).glob(f"{UNFINISHED}-*")):
        if re.fullmatch(rf"{UNFINISHED}-[0-9a-f]{{8}}-\d+", folder.name):
            names = sorted(path.name for path in folder.glob("*"))
            if remove(folder):
                warnings.warn(f"Removed {folder}, left by a save that did not end, with {len(names)} in it: {names}.")


def give_name(unfinished: str, folder: str) -> None:
    """Move a checkpoint, which is complete on the disk, out of the folder `unfinished`, to its name."""
    if os.path.isdir(folder):  # of an earlier run
        _move_away(folder, unfinished)
    os.rename(os.path.join(unfinished, os.path.basename(folder)), folder)
    flush(os.path.dirname(folder))


def rotate(unfinished: str, newest: str, limit: int | None, best: str | None) -> None:
    """
    Delete the folder `unfinished`, and the checkpoints beyond the limit: the oldest, but for the newest and best.

    The choice is that of transformers' `rotate_checkpoints`. That deletes them file by file under their own names:
    killed within, it leaves parts of one. These are the last to be modified, so that its next rotation would keep
    them in place of a complete one. What cannot be deleted is warned of: the checkpoint is saved, and the run goes on.
    """
    if limit is not None and limit > 0:
        in_order = sort_checkpoints(os.path.dirname(unfinished), use_mtime=True)
        checkpoints = [os.path.normpath(path) for path in in_order]
        kept = {os.path.normpath(path) for path in (newest, best) if path is not None}
        surplus = max(0, len(checkpoints) - limit)
        for folder in [path for path in checkpoints if path not in kept][:surplus]:
            try:
                os.makedirs(unfinished, exist_ok=True)
                _move_away(folder, unfinished)
            except OSError as error:
                warnings.warn(f"{folder} is beyond `save_total_limit`, but cannot be deleted: {error}")
    remove(unfinished)


def remove(folder: str | Path) -> bool:
    """Delete what can be deleted of a folder, warn of the rest, and return whether nothing is left."""
    with contextlib.suppress(OSError):
        shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):  # NFS keeps a file, as `.nfs...`, until no process has it open
        warnings.warn(f"{folder} cannot be deleted. No run reads it: delete it when no process uses what is in it.")
    return not os.path.lexists(folder)


def _move_away(folder: str, unfinished: str) -> None:
    os.rename(folder, os.path.join(unfinished, f"old-{os.path.basename(folder)}"))
