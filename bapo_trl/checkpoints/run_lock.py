"""Keeps a second live run out of a folder: a lock that ends with the process, however that ends."""

import contextlib
import warnings
from pathlib import Path

from filelock import FileLock, Timeout  # which torch requires


LOCK = "_running"
"""The locked file. A run that is killed leaves it, which keeps nobody out; no upload takes what begins with `_`."""


class RunLock:
    """Lock of the folder of a run."""

    def __init__(self, folder: str):
        self._folder = folder
        self._lock = FileLock(Path(folder, LOCK).absolute(), thread_local=False)

    def acquire(self) -> str | None:
        """Take the lock; return why not, if another run has it. A file system without locks gives a warning."""
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            return (
                f"`output_dir` is {self._folder}, where another run is training or evaluates: give each run an "
                "`output_dir` of its own, or wait for the end of that one."
            )
        except (NotImplementedError, OSError) as error:  # Lustre mounted without locks (ENOSYS), and NFS (ENOLCK)
            warnings.warn(
                f"{self._lock.lock_file} cannot be locked ({error}): see that no other run writes into this folder."
            )
        return None

    def release(self) -> None:
        """Let go of the lock, if it is held, and remove the file."""
        if self._lock.is_locked:
            with contextlib.suppress(OSError):  # the folder may be gone by now, or be read-only
                Path(self._lock.lock_file).unlink()
            self._lock.release()
