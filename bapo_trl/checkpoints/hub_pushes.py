"""What of a checkpoint goes to the Hub: the samples in it may be nobody else's business."""

import contextlib
import json
import os
import shutil
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..replay.checkpoint import is_queue_file
from ..rollouts.checkpoint import is_pool_file
from ..trainer_mixin import TrainerMixin
from .files import MANIFEST


TO_PUSH = "_to_push"  # in the run's folder; no upload takes what begins with `_`


class LeavesSamplesOut(TrainerMixin):
    """
    Uploads checkpoints without the samples in them, if `hub_push_samples` is false. To be put before
    [`~transformers.Trainer`] among the bases of a trainer.

    - `_push_from_checkpoint`: shows the parent a folder of links to all other files, which are a whole checkpoint too.
      The links of the pushes before go once these are done: they would keep rotated checkpoints on the disk.
    - `_finish_current_push`: removes the links.
    """

    def _push_from_checkpoint(self, checkpoint_folder):
        if self._leaves_samples_out:
            if self.push_in_progress is None or self.push_in_progress.is_done():
                self._remove_links()
            elif not self.args.hub_always_push:
                return  # as the parent: it would look again, and push the samples if the push is done by then
            checkpoint_folder = link_without_samples(checkpoint_folder)
        super()._push_from_checkpoint(checkpoint_folder)

    def _finish_current_push(self):
        super()._finish_current_push()
        if self._leaves_samples_out:
            self._remove_links()

    @property
    def _leaves_samples_out(self) -> bool:
        is_asked_for = self.args.pushes_checkpoints and not self.args.hub_push_samples
        return is_asked_for and self.is_world_process_zero()

    def _remove_links(self) -> None:
        links = Path(self.args.output_dir, TO_PUSH)
        for folder in links.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # not there, or with files of the user in it
            links.rmdir()


def link_without_samples(folder: str | Path) -> str:
    """
    Link the files of a checkpoint folder, but for the replay queues and the pools of unfinished rollouts, into a
    folder of the same name in `_to_push` beside it.

    The links keep the files for an upload that takes longer than the checkpoint is kept. A file system without hard
    links gets copies. The manifest there lists what is linked, so that the copy is a whole checkpoint.

    Args:
        folder (`str` or `Path`):
            Checkpoint folder.

    Returns:
        `str`: Path of the folder with the links.
    """
    folder = Path(folder)
    links = folder.parent / TO_PUSH / folder.name
    shutil.rmtree(links, ignore_errors=True)
    shutil.copytree(folder, links, copy_function=_link_or_copy, ignore=_samples)
    manifest = links / MANIFEST
    if manifest.exists():
        sizes = json.loads(manifest.read_text(encoding="utf-8"))
        manifest.unlink()  # a link: to write to it would write to the checkpoint's own
        kept = {path: size for path, size in sizes.items() if not is_sample_file(path)}
        manifest.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    return str(links)


def is_sample_file(name: str) -> bool:
    """Return whether a file of a checkpoint folder, by its name, holds samples: a replay queue or a pool."""
    return is_queue_file(name) or is_pool_file(name)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # EPERM, EOPNOTSUPP, ...: each file system has its own
        shutil.copy2(source, target)


def _samples(_: str, names: list[str]) -> list[str]:
    return [name for name in names if is_sample_file(name)]
