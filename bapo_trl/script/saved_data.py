"""A folder that a dataset was saved to is read, and never written into."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from datasets import Dataset, IterableDataset, disable_caching, enable_caching, is_caching_enabled
from datasets.config import DATASET_STATE_JSON_FILENAME


@contextmanager
def apart_from_saved(dataset: Dataset | IterableDataset) -> Iterator[None]:
    """
    Have datasets keep what it makes of rows of `save_to_disk` in a temporary folder (`TMPDIR`), not beside them.

    Others keep their cache: what it makes of them is there at the next start.
    """
    files = [Path(file["filename"]) for file in getattr(dataset, "cache_files", [])]
    is_saved = any(file.with_name(DATASET_STATE_JSON_FILENAME).exists() for file in files)
    if not is_saved or not is_caching_enabled():
        yield
        return
    disable_caching()
    try:
        yield
    finally:
        enable_caching()
