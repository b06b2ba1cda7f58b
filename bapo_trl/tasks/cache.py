"""Cache of folders that are built once. Invariant: a folder under its final name is complete."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from ..errors import InputError


def cached_folder(name: str, what: str, build: Callable[[Path], None]) -> Path:
    """
    Return a folder in the cache `$BAPO_TRL_CACHE` (by default `~/.cache/bapo_trl`), and build it on first use.

    `name` should contain a hash or version of the content. `what` describes the content in messages. `build` writes
    the content into an empty folder; if it raises an exception, the folder is removed.
    """
    root = Path(os.environ.get("BAPO_TRL_CACHE") or Path.home() / ".cache" / "bapo_trl").expanduser()
    path = root / name
    if path.is_dir():
        return path
    try:
        root.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f"{name}.unfinished-", dir=root))
    except OSError as error:
        fix = "Set the environment variable BAPO_TRL_CACHE to a folder that you can write to."
        raise InputError(f"No folder can be created for {what}: {error}. {fix}") from error
    print(f"Building {what}, once ...", flush=True)
    try:
        build(unfinished)
        unfinished.rename(path)
    except OSError:
        if not path.is_dir():  # otherwise, another process finished first
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return path
