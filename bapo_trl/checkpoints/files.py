"""
The checkpoint folders of a run: check whether they are complete, write them to the disk and delete them.

A checkpoint is written in a folder `_unfinished-ID`, and moved to such a folder to be deleted.
"""

import contextlib
import errno
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints


MANIFEST = "checkpoint_files.json"
UNFINISHED = "_unfinished"  # start of the folder's name
_NAME = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-[0-9]+")


def find_defect(folder: str | Path, is_dispensable: Callable[[str], bool] = lambda file: False) -> str | None:
    """
    Return why a checkpoint is not complete, or `None` if it is complete.

    With a manifest, every file must exist with its size, but for those that are dispensable, by their paths in the
    manifest. Without a manifest, as from another trainer, `trainer_state.json` must exist, which transformers writes
    last.
    """
    folder = Path(folder)
    if not os.path.isdir(folder):  # unlike `Path.is_dir`, this does not raise if access fails
        return "there is no such folder"
    try:
        os.stat(folder / TRAINER_STATE_NAME)  # raises if access fails, unlike functions that return `False`
        defects = _changed_files(folder, is_dispensable) if os.path.isfile(folder / MANIFEST) else []
    except FileNotFoundError as error:
        return f"{os.path.basename(error.filename)} is missing"
    except (OSError, ValueError) as error:
        return f"it cannot be read ({error})"
    return "; ".join(defects) or None


def _changed_files(folder: Path, is_dispensable: Callable[[str], bool]) -> list[str]:
    """Return the differences from the manifest."""
    sizes = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    if not isinstance(sizes, dict) or TRAINER_STATE_NAME not in sizes:
        return [f"{MANIFEST} does not list {TRAINER_STATE_NAME}"]
    defects = []
    for name, size in sizes.items():
        if is_dispensable(name):
            continue
        if not os.path.isfile(folder / name):
            defects.append(f"{name} is missing")
        elif (found := os.path.getsize(folder / name)) != size:
            defects.append(f"{name} has {found} bytes, not {size}")
    return defects


def left_out_states(folder: str) -> list[str]:
    """Return the states that a checkpoint lacks for a resumed run."""
    of_optimizer = ("*optimizer*", "global_step*")  # the second is DeepSpeed's, which includes the schedule
    states = {"optimizer, learning rate schedule": of_optimizer, "random states": ("rng_state*",)}
    return [name for name, files in states.items() if not any(any(Path(folder).glob(each)) for each in files)]


def checkpoint_names(run_dir: str | Path) -> list[str]:
    """Return the names of the checkpoints in the folder of a run, in the order of their updates."""
    names = [path.name for path in Path(run_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")]
    return sorted(filter(_NAME.fullmatch, names), key=step_of)


def step_of(name: str) -> int:
    """Return the number of optimizer updates before a checkpoint, from its name."""
    return int(name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-"))


def write_manifest(folder: str | Path) -> None:
    """Write the sizes of all files of a checkpoint into its folder."""
    sizes = {}
    for path in sorted(Path(folder).rglob("*")):
        if path.is_file():
            with path.open("rb") as file:  # over NFS, a size found by name may be outdated
                sizes[path.relative_to(folder).as_posix()] = os.fstat(file.fileno()).st_size
    Path(folder, MANIFEST).write_text(json.dumps(sizes, indent=2) + "\n", encoding="utf-8")


def flush_tree(folder: str) -> None:
    """Wait until all files below a folder are on the disk."""
    # In parallel, so that a journaling file system writes its journal for many files at once
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(flush, (*Path(folder).rglob("*"), Path(folder))))


def flush(path: str | Path) -> None:
    """Wait until a file, or the list of a folder's files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems do not support this for folders
        if not (os.path.isdir(path) and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(descriptor)


def remove_left_behind(run_dir: str) -> None:
    """Delete the remains of interrupted saves in the folder of a run, with a warning."""
    for folder in sorted(Path(run_dir).glob(f"{UNFINISHED}-*")):
        if re.fullmatch(rf"{UNFINISHED}-[0-9a-f]{{8}}-\d+", folder.name):
            names = sorted(path.name for path in folder.glob("*"))
            if remove(folder):
                warnings.warn(f"Removed {folder}, left by an interrupted save, with {len(names)} entries: {names}.")


def move_into_place(unfinished: str, folder: str) -> None:
    """Move a checkpoint that is complete on the disk from the folder `unfinished` to its final name."""
    if os.path.isdir(folder):  # of an earlier run
        _move_away(folder, unfinished)
    os.rename(os.path.join(unfinished, os.path.basename(folder)), folder)
    flush(os.path.dirname(folder))


def rotate(unfinished: str, newest: str, limit: int | None, best: str | None) -> None:
    """
    Delete the folder `unfinished`, and the oldest checkpoints beyond the limit, except the newest and the best.

    The choice is the same as in transformers' `rotate_checkpoints`, which deletes file by file under the checkpoint's
    own name and leaves an incomplete one if it is killed. If a file cannot be deleted, there is a warning.
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
    """Delete as much as possible of a folder, warn about the rest, and return whether nothing is left."""
    with contextlib.suppress(OSError):
        shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):  # NFS keeps a file, as `.nfs...`, until no process has it open
        warnings.warn(f"{folder} cannot be deleted. No run needs it: delete it once no process uses its files.")
    return not os.path.lexists(folder)


def _move_away(folder: str, unfinished: str) -> None:
    os.rename(folder, os.path.join(unfinished, f"old-{os.path.basename(folder)}"))
