"""A lock that keeps a second live run out of a folder. It ends with the process, even if the process is killed."""

import contextlib
import warnings
from pathlib import Path

from filelock import FileLock, Timeout  # which torch requires


LOCK = "_running"
"""The locked file. A killed run leaves it without a lock; uploads skip names that begin with `_`."""


class RunLock:
    """Lock of the folder of a run."""

    def __init__(self, folder: str):
        self._folder = folder
        self._lock = FileLock(Path(folder, LOCK).absolute(), thread_local=False)

    def acquire(self) -> str | None:
        """Take the lock; return an error message if another run has it. Warn if the file system has no locks."""
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            return (
                f"`output_dir` is {self._folder}, where another run is training or evaluating: use another "
                "`output_dir`, or wait until that run has ended."
            )
        except (NotImplementedError, OSError) as error:  # Lustre mounted without locks (ENOSYS), and NFS (ENOLCK)
            warnings.warn(
                f"{self._lock.lock_file} cannot be locked ({error}): make sure that no other run uses this folder."
            )
        return None

    def release(self) -> None:
        """Release the lock, if this run has it, and remove the file."""
        if self._lock.is_locked:
            with contextlib.suppress(OSError):  # the folder may be gone by now, or be read-only
                Path(self._lock.lock_file).unlink()
            self._lock.release()
