"""Keeps a second live run out of a folder: a lock that ends with the process, however that ends."""

import contextlib
import os
import warnings
from pathlib import Path


LOCK = "_running"
"""The locked file. A run that is killed leaves it, which keeps nobody out; no upload takes what begins with `_`."""


_held: set[int] = set()
"""Descriptors of this process. A child that is forked gets them too, and would hold the lock after our end."""


def _let_go_in_a_child() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_a_child)


class RunLock:
    """Lock of the folder of a run."""

    def __init__(self, folder: str):
        self._path = Path(folder, LOCK)
        self._descriptor: int | None = None

    def acquire(self) -> str | None:
        """Take the lock; return why not, if another run has it. A file system without locks gives a warning."""
        try:
            self._descriptor = _lock(self._path)
            _held.add(self._descriptor)
        except BlockingIOError:
            return (
                f"`output_dir` is {self._path.parent}, where another run is training or evaluates: give each run an "
                "`output_dir` of its own, or wait for the end of that one."
            )
        except (ImportError, OSError) as error:
            warnings.warn(f"{self._path} cannot be locked ({error}): see that no other run writes into this folder.")
        return None

    def release(self) -> None:
        """Let go of the lock, if it is held, and remove the file."""
        if self._descriptor in _held:
            _held.remove(self._descriptor)
            with contextlib.suppress(OSError):  # the folder may be gone by now, or be read-only
                self._path.unlink()
            os.close(self._descriptor)
            self._descriptor = None


def _lock(path: Path) -> int:
    """Return the descriptor of a file, made if it is not there, that no other process holds locked."""
    import fcntl  # Windows has none

    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(descriptor)
            raise
        if os.fstat(descriptor).st_nlink:  # else its holder removed it in the meantime: of the name, there is another
            return descriptor
        os.close(descriptor)
