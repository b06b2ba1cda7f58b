"""Folders that are built once and kept. Invariant: a folder under its final name is complete."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from ..errors import InputError


def cached_folder(name: str, what: str, build: Callable[[Path], None]) -> Path:
    """
    Give a folder of the cache `$BAPO_TRL_CACHE` (`~/.cache/bapo_trl` if that is not set), building it on first use.

    Its name should contain a hash of all that shapes its content. The terminal says `what` it holds. `build` writes
    the content into an empty folder; what it raises leaves nothing behind.
    """
    path = _root() / name
    if path.is_dir():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f"{name}.unfinished-", dir=path.parent))
    except OSError as error:
        fix = "Set the environment variable BAPO_TRL_CACHE to a folder that you can write to."
        raise InputError(f"There is no folder for {what}: {error}. {fix}") from error
    print(f"Building {what}, once ...", flush=True)
    try:
        build(unfinished)
        unfinished.rename(path)
    except OSError:
        if not path.is_dir():  # anything but another process that finished first
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return path


def is_cached(name: str) -> bool:
    """Return whether a folder of the cache is built."""
    return (_root() / name).is_dir()


def _root() -> Path:
    return Path(os.environ.get("BAPO_TRL_CACHE") or Path.home() / ".cache" / "bapo_trl").expanduser()
