"""What the folder of a checkpoint holds, what is missing, what it was saved without; and its way to the disk."""

import errno
import json
import os
import re
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR


MANIFEST = "checkpoint_files.json"
_NAME = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-[0-9]+")


def find_defect(folder: str | Path, is_dispensable: Callable[[str], bool] = lambda file: False) -> str | None:
    """
    Return what keeps a checkpoint from being complete, `None` if it is.

    With a manifest, every file must be there with its size. Without one, as of another trainer, `trainer_state.json`
    must be there, which transformers writes last, and no file be cut off. `is_dispensable` tells of a file of the
    manifest, by its path in the folder, whether it may be missing or of another size.
    """
    folder = Path(folder)
    if not os.path.isdir(folder):  # those of `Path` raise what keeps them from looking
        return "there is no such folder"
    has_manifest = os.path.isfile(folder / MANIFEST)
    contents = {}
    for name in (MANIFEST, TRAINER_STATE_NAME) if has_manifest else (TRAINER_STATE_NAME,):
        try:
            contents[name] = json.loads((folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        except (ValueError, RecursionError):
            return f"{name} is not complete"
        if not isinstance(contents[name], dict):
            return f"{name} is not what was written"
    if _NAME.fullmatch(folder.name) and contents[TRAINER_STATE_NAME].get("global_step") != step_of(folder.name):
        return f"{TRAINER_STATE_NAME} is not what was written"
    if not has_manifest:
        return _cut_off(folder)
    sizes = contents[MANIFEST]
    if TRAINER_STATE_NAME not in sizes:
        return f"{MANIFEST} does not list {TRAINER_STATE_NAME}"
    defects = []
    for name, size in sizes.items():
        path = folder / name
        if is_dispensable(name):
            continue
        if not os.path.isfile(path):
            defects.append(f"{name} is missing")
        elif (found := path.stat().st_size) != size:
            defects.append(f"{name} has {found} bytes, not {size}")
    return "; ".join(defects) or None


def _cut_off(folder: Path) -> str | None:
    """Return which files of a checkpoint are cut off or missing, by what they say of themselves; `None` for none."""
    defects = []
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        name = path.relative_to(folder).as_posix()
        try:
            if not _is_complete(path):
                defects.append(f"{name} is not complete")
            elif name.endswith(".index.json"):
                shards = set(json.loads(path.read_text(encoding="utf-8")).get("weight_map", {}).values())
                defects += [f"{shard} is missing" for shard in sorted(shards) if not (path.parent / shard).is_file()]
        except OSError as error:
            defects.append(f"{name} cannot be read ({error.strerror})")
    return "; ".join(defects) or None


def _is_complete(path: Path) -> bool:
    """Whether a file of JSON, safetensors or torch has its end; True for any other."""
    try:
        if path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
        elif path.suffix == ".safetensors":
            with safe_open(path, framework="pt"):
                pass
    except (ValueError, RecursionError, SafetensorError):
        return False
    return path.suffix not in (".pt", ".pth", ".bin") or zipfile.is_zipfile(path)


def left_out_states(folder: str) -> list[str]:
    """Return the states that a run resumed from a checkpoint does not find there."""
    of_optimizer = ("*optimizer*", "global_step*")  # the second of DeepSpeed, with the schedule in it
    states = {"optimizer, learning rate schedule": of_optimizer, "random states": ("rng_state*",)}
    return [name for name, files in states.items() if not any(any(Path(folder).glob(each)) for each in files)]


def checkpoint_names(run_dir: str | Path) -> list[str]:
    """Return the names of the checkpoints in the folder of a run, in the order of their updates."""
    names = [path.name for path in Path(run_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")]
    return sorted(filter(_NAME.fullmatch, names), key=step_of)


def step_of(name: str) -> int:
    """Return the optimizer updates that a checkpoint of this name has behind it."""
    return int(name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-"))


def write_manifest(folder: str | Path) -> None:
    """Write the sizes of all files of a checkpoint into its folder."""
    sizes = {}
    for path in sorted(Path(folder).rglob("*")):
        if path.is_file():
            with path.open("rb") as file:  # over NFS, what another node wrote is not seen by its name
                sizes[path.relative_to(folder).as_posix()] = os.fstat(file.fileno()).st_size
    Path(folder, MANIFEST).write_text(json.dumps(sizes, indent=2) + "\n", encoding="utf-8")


def flush_tree(folder: str) -> None:
    """Wait until all below a folder is on the disk."""
    # At once: a file system with a journal then writes that for many files together, not once for each
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(flush, (*Path(folder).rglob("*"), Path(folder))))


def flush(path: str | Path) -> None:
    """Wait until a file, or the list of a folder's files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no such thing for folders
        if not (os.path.isdir(path) and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(descriptor)
