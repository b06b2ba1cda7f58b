"""Files on the disk, not in its cache alone: what is there after a loss of power."""

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


_EARLY_BYTES = 16 * 2**20  # a file that has grown by as many is sent to the disk while it is written


@contextlib.contextmanager
def flush_early(folder: str) -> Iterator[None]:
    """Send large files below a folder to the disk while they are written: less is left to wait for afterwards."""
    is_written = threading.Event()
    flushed: dict[Path, int] = {}

    def flush_what_has_grown():
        while not is_written.wait(0.02):
            with contextlib.suppress(OSError):  # all is flushed again, and then an error counts
                for path in Path(folder).rglob("*"):
                    size = path.stat().st_size
                    if size >= flushed.get(path, 0) + _EARLY_BYTES:
                        flush(path)
                        flushed[path] = size

    thread = threading.Thread(target=flush_what_has_grown, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_written.set()
        thread.join()


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
