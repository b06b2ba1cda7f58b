"""The library datasets keeps what it prepares. Here, it does not."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets
from datasets import config
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES as LOADERS  # "json", "csv", ...


@contextmanager
def throwaway_cache() -> Iterator[Path]:
    """
    Have datasets prepare files and map rows in a folder that goes, without progress bars, and yield that folder.

    What is prepared already of the Hub's data is read from where it is.
    """
    kept: Path = config.HF_DATASETS_CACHE
    caches, shows_bars = datasets.is_caching_enabled(), not datasets.utils.are_progress_bars_disabled()
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "datasets"
        cache.mkdir()
        for path in kept.iterdir() if kept.is_dir() else ():
            if path.is_dir() and path.name not in LOADERS:
                (cache / path.name).symlink_to(path.resolve())
        config.HF_DATASETS_CACHE = cache
        datasets.disable_caching()  # of what is mapped: beside the user's data
        datasets.disable_progress_bars()
        try:
            yield Path(folder)
        finally:
            config.HF_DATASETS_CACHE = kept
            if caches:
                datasets.enable_caching()
            if shows_bars:
                datasets.enable_progress_bars()
