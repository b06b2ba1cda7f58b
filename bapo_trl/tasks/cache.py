"""
Folders that are built once and kept, such as a model that is made of a package.

Invariant: a folder under its final name is complete. It is written under a temporary name and renamed, so an
interrupted build is never reused, and of two processes that build at once one wins and both read the same files.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ..errors import InputError


def cached_folder(name: str, what: str, how_long: str, build: Callable[[Path], None]) -> Path:
    """
    Give a folder of the cache `$BAPO_TRL_CACHE` (`~/.cache/bapo_trl` if that is not set), building it on first use.

    Its name should contain a hash of all that shapes its content. The terminal says `what` it holds, and `how_long`
    building takes. `build` writes the content into an empty folder; what it raises leaves nothing behind.
    """
    try:
        root = _root()
        path = root / name
        if path.is_dir():
            return path
        root.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f"{name}.unfinished-", dir=root))
    except (OSError, RuntimeError) as error:  # a user without a home
        fix = "Set the environment variable BAPO_TRL_CACHE to a folder that you can write to."
        raise InputError(f"There is no folder for {what}: {error}. {fix}") from error
    print(f"Building {what}, once ({how_long}) ...", flush=True)
    started = time.perf_counter()
    try:
        build(unfinished)
        try:
            unfinished.rename(path)
        except OSError:
            if not path.is_dir():  # anything but another process that finished first
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    print(f"Built {what} in {path} ({time.perf_counter() - started:.0f} s, once).", flush=True)
    return path


def is_cached(name: str) -> bool:
    """Return whether a folder of the cache is built."""
    try:
        return (_root() / name).is_dir()
    except RuntimeError:  # a user without a home
        return False


def _root() -> Path:
    return Path(os.environ.get("BAPO_TRL_CACHE") or Path.home() / ".cache" / "bapo_trl").expanduser()
