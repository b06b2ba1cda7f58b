"""What the folder of a checkpoint holds, what is missing, what it was saved without; and its way to the disk."""

import errno
import json
import os
import re
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints


MANIFEST = "checkpoint_files.json"
_NAME = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-[0-9]+")


def find_defect(folder: str | Path, is_dispensable: Callable[[str], bool] = lambda file: False) -> str | None:
    """
    Return what keeps a checkpoint from being whole, `None` if it is.

    With a manifest, every file must be there with its size. A checkpoint without one, of another trainer or an older
    version, counts as whole if its `trainer_state.json` can be read, which transformers writes last, and no file is
    cut off, as by a copy that did not end. The state must be
    of the update in the folder's name. `is_dispensable` tells of a file of the manifest, by its path in the folder,
    whether it may be missing or of another size.
    """
    folder = Path(folder)
    if not os.path.isdir(folder):  # those of `Path` raise what keeps them from looking
        return "there is no such folder"
    has_manifest = os.path.isfile(folder / MANIFEST)
    contents = []
    for name in (MANIFEST, TRAINER_STATE_NAME) if has_manifest else (TRAINER_STATE_NAME,):
        try:
            contents.append(json.loads((folder / name).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return f"{name} is missing"
        except (ValueError, RecursionError):
            return f"{name} is not complete"
        except OSError as error:  # no permission, a disk that fails
            return f"{name} cannot be read ({error.strerror})"
        if not isinstance(contents[-1], dict) or (name == TRAINER_STATE_NAME and not _is_state(contents[-1], folder)):
            return f"{name} is not what was written"
    if not has_manifest:
        return _cut_off(folder)
    sizes = contents[0]
    if TRAINER_STATE_NAME not in sizes:
        return f"{MANIFEST} does not list {TRAINER_STATE_NAME}"
    defects = []
    for path, size in sizes.items():
        if os.path.isabs(path) or ".." in Path(path).parts:
            return f"{MANIFEST} lists {path}, which is not in the folder"
        if is_dispensable(path):
            continue
        found = _size(folder / path)
        if found is None:
            defects.append(f"{path} is missing")
        elif found != size:
            defects.append(f"{path} has {found} bytes, not {size}")
    return "; ".join(defects) or None


def _cut_off(folder: Path) -> str | None:
    """Return which files of a checkpoint are cut off or missing, by what they say of themselves; `None` for none."""
    defects = []
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        name = path.relative_to(folder).as_posix()
        try:
            if not _is_whole(path):
                defects.append(f"{name} is not complete")
            elif name.endswith(".index.json"):
                shards = set(json.loads(path.read_text(encoding="utf-8")).get("weight_map", {}).values())
                defects += [f"{shard} is missing" for shard in sorted(shards) if not (path.parent / shard).is_file()]
        except OSError as error:
            defects.append(f"{name} cannot be read ({error.strerror})")
    return "; ".join(defects) or None


def _is_whole(path: Path) -> bool:
    """Whether a file of JSON, safetensors or torch has its end; True for any other."""
    if path.suffix == ".json":
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            return False
    with path.open("rb") as file:
        begin, size = file.read(8), os.fstat(file.fileno()).st_size
        if path.suffix == ".safetensors":
            length = int.from_bytes(begin, "little")
            try:
                header = json.loads(file.read(length)) if len(begin) == 8 and length <= size else None
                ends = [each["data_offsets"][1] for name, each in header.items() if name != "__metadata__"]
            except (AttributeError, LookupError, TypeError, ValueError):
                return False
            return size == 8 + length + max(ends, default=0)
    is_of_torch = path.suffix in (".pt", ".pth", ".bin")
    return not is_of_torch or (size > 0 and (not begin.startswith(b"PK") or zipfile.is_zipfile(path)))


def left_out_states(folder: str) -> list[str]:
    """Return the states that a run resumed from a checkpoint does not find there."""
    of_optimizer = ("*optimizer*", "global_step*")  # the second of DeepSpeed, with the schedule in it
    states = {"optimizer, learning rate schedule": of_optimizer, "random states": ("rng_state*",)}
    return [name for name, files in states.items() if not any(any(Path(folder).glob(each)) for each in files)]


def _is_state(content: dict, folder: Path) -> bool:
    """Whether it is a state, of the update in the folder's name, and of no more passes than updates."""
    try:
        state = TrainerState(**content)
        is_of_folder = _NAME.fullmatch(folder.name) is None or state.global_step == step_of(folder.name)
        return is_of_folder and type(state.global_step) is int and 0 <= (state.epoch or 0) <= state.global_step
    except (AttributeError, LookupError, TypeError, ValueError):
        return False


def _size(file: Path) -> int | None:
    try:
        return file.stat().st_size if file.is_file() else None
    except (OSError, ValueError):  # no name of a file
        return None


def _fresh_size(file: Path) -> int:
    """Return the size of a file that is there, opened: over NFS, what another node wrote is not seen by its name."""
    with file.open("rb") as opened:
        return os.fstat(opened.fileno()).st_size


def checkpoint_names(run_dir: str) -> list[str]:
    """Return the names of the checkpoints in the folder of a run."""
    names = [os.path.basename(path) for path in sort_checkpoints(run_dir)]
    return [name for name in names if _NAME.fullmatch(name)]


def step_of(name: str) -> int:
    """Return the optimizer updates that a checkpoint of this name has behind it."""
    return int(name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-"))


def write_manifest(folder: str) -> None:
    """Write the sizes of all files of a checkpoint into its folder."""
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    sizes = {path.relative_to(folder).as_posix(): _fresh_size(path) for path in files}
    Path(folder, MANIFEST).write_text(json.dumps(sizes, indent=2) + "\n", encoding="utf-8")


def flush_tree(folder: str) -> None:
    """Wait until all below a folder is on the disk."""
    # At once: a file system with a journal then writes that for many files together, not once for each
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(flush, (*Path(folder).rglob("*"), Path(folder))))


def flush(path: str | Path) -> None:
    """Wait until a file, or the list of a folder's files, is on the disk."""
    if os.name == "nt":
        return  # which cannot flush what is not open for writing; a rename there still outlives the process
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no such thing for folders.
        if not (os.path.isdir(path) and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(descriptor)
