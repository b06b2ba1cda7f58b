"""What of a checkpoint goes to the Hub: the samples in it may be nobody else's business."""

import json
import os
import shutil
from pathlib import Path

from .generation.pool_checkpoint import is_pool_file
from .replay.checkpoint import is_queue_file
from .trainer_mixin import TrainerMixin
from .whole_checkpoint import MANIFEST


TO_PUSH = "_to_push"  # in the run's folder; no upload takes what begins with `_`


class LeavesSamplesOut(TrainerMixin):
    """
    Uploads checkpoints without the samples in them, if `hub_push_samples` is false. To be put before
    [`~transformers.Trainer`] among the bases of a trainer.

    - `_push_from_checkpoint`: shows the parent a folder of links to all other files, which are a whole checkpoint too.
    - `_finish_current_push`: removes these links.
    """

    def _push_from_checkpoint(self, checkpoint_folder):
        if not self.args.hub_push_samples and self.is_world_process_zero():
            checkpoint_folder = link_without_samples(checkpoint_folder)
        super()._push_from_checkpoint(checkpoint_folder)

    def _finish_current_push(self):
        super()._finish_current_push()
        if not self.args.hub_push_samples and self.is_world_process_zero():
            shutil.rmtree(os.path.join(self.args.output_dir, TO_PUSH), ignore_errors=True)


def link_without_samples(folder: str | Path) -> str:
    """
    Link the files of a checkpoint folder, but for the replay queues and the pools of unfinished rollouts, into a
    folder of the same name in `_to_push` beside it.

    The links keep the files for an upload that takes longer than the checkpoint is kept. The manifest there lists what
    is linked, so that the copy is a whole checkpoint.

    Args:
        folder (`str` or `Path`):
            Checkpoint folder.

    Returns:
        `str`: Path of the folder with the links.
    """
    folder = Path(folder)
    links = folder.parent / TO_PUSH / folder.name
    shutil.rmtree(links, ignore_errors=True)
    shutil.copytree(folder, links, copy_function=os.link, ignore=_samples)
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


def _samples(_: str, names: list[str]) -> list[str]:
    return [name for name in names if is_sample_file(name)]
