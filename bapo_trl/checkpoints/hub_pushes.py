"""What of a checkpoint goes to the Hub: the samples in it may be nobody else's business."""

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .files import MANIFEST, write_manifest


TO_PUSH = "_to_push"  # in the run's folder; no upload takes what begins with `_`


class PushesWithoutSamples:
    """
    Gives the uploads of a trainer folders of links to all files of a checkpoint but those with samples: whole
    checkpoints too. The links of the pushes before go once these are done: they would keep rotated checkpoints on the
    disk. Of the main process.
    """

    def __init__(self, output_dir: str | Path, always_pushes: bool, is_sample_file: Callable[[str], bool]):
        self._links = Path(output_dir, TO_PUSH)
        self._always_pushes, self._is_sample_file = always_pushes, is_sample_file

    def folder_to_push(self, checkpoint: str, push_in_progress: Any | None) -> str | None:
        """Return the folder to upload instead of a checkpoint's; `None` for no upload."""
        if push_in_progress is None or push_in_progress.is_done():
            self.remove_links()
        elif not self._always_pushes:
            return None  # as transformers: it would look again, and push the samples if the push is done by then
        return link_without_samples(checkpoint, self._is_sample_file)

    def remove_links(self) -> None:
        """Remove the links of all pushes."""
        for folder in self._links.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # not there, or with files of the user in it
            self._links.rmdir()


def make_pushes(trainer: Any, is_sample_file: Callable[[str], bool]) -> PushesWithoutSamples | None:
    """Return what a trainer pushes by; `None` where it pushes whole checkpoints as they are, or none."""
    args = trainer.args
    if not args.pushes_checkpoints or args.hub_push_samples or not trainer.is_world_process_zero():
        return None
    return PushesWithoutSamples(args.output_dir, args.hub_always_push, is_sample_file)


def link_without_samples(folder: str | Path, is_sample_file: Callable[[str], bool]) -> str:
    """
    Link the files of a checkpoint folder, but for those with samples, into a folder of the same name in `_to_push`
    beside it.

    The links keep the files for an upload that takes longer than the checkpoint is kept. A file system without hard
    links gets copies. The manifest there lists what is linked, so that the copy is a whole checkpoint.
    """
    folder = Path(folder)
    links = folder.parent / TO_PUSH / folder.name
    shutil.rmtree(links, ignore_errors=True)

    def samples(_: str, names: list[str]) -> list[str]:
        return [name for name in names if is_sample_file(name)]

    shutil.copytree(folder, links, copy_function=_link_or_copy, ignore=samples)
    if (links / MANIFEST).exists():
        (links / MANIFEST).unlink()  # a link: to write to it would write to the checkpoint's own
        write_manifest(str(links))
    return str(links)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # EPERM, EOPNOTSUPP, ...: each file system has its own
        shutil.copy2(source, target)
