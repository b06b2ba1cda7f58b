"""Checkpoints that are complete or not there, whenever the processes are killed and whatever they are saving.

Invariant: a folder `checkpoint-N` holds all files of its manifest. It is written in `_unfinished-ID`, with an id of
the save, flushed to the disk and renamed; one that has to go is renamed back to there and then deleted. The folder is
deleted at the end of a save, and a folder of checkpoints has one live run: if one is found, it was left by a save that
did not end or by files that could not be deleted, and is removed. Neither transformers nor an upload to the Hub takes
it, or what is in it, for a checkpoint.
"""

import contextlib
import errno
import os
import shutil
import uuid
import warnings
from collections.abc import Iterator

from accelerate.utils import gather_object
from safetensors import SafetensorError
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer

from ..errors import InputError
from .files import (
    MANIFEST,
    UNFINISHED,
    checkpoint_names,
    find_defect,
    flush_tree,
    left_out_states,
    move_into_place,
    remove_left_behind,
    rotate,
    write_manifest,
)
from .rank_errors import on_main_process, raise_on_all_ranks, raising_on_all_ranks
from .run_lock import RunLock
from .stop_signals import is_stopped


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What these become where safetensors writes, and any error of a write where torch does
_NO_ROOM_TEXTS = (*map(os.strerror, _NO_ROOM), "iostream error", "file write failed")


class AtomicCheckpoints(GRPOTrainer):
    """
    A trainer whose checkpoints are complete or not there. All that it overrides is of [`~transformers.Trainer`].

    A save lets the parents write into `_unfinished-ID`, where their rotation finds one checkpoint and leaves it; then
    it renames, rotates and pushes.
    """

    _run_id = ""  # of the latest run, the same on all ranks
    _num_saves = 0  # each has a folder of its own: files that cannot be deleted may keep it
    _has_locked_output_dir = False

    _is_saving = False
    _is_ending = False  # with a checkpoint to be resumed from, which is not pushed
    _last_checkpoint: str | None = None  # of this run: saved by it, not the model alone, or resumed from

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        with self.locking_output_dir():
            with raising_on_all_ranks():
                if self.is_local_process_zero():
                    remove_left_behind(self.args.output_dir)
            self._last_checkpoint = self.checkpoint_to_resume(resume_from_checkpoint)
            if self._last_checkpoint is not None and self.is_world_process_zero():
                left_out = left_out_states(self._last_checkpoint)
                if left_out:
                    warnings.warn(
                        f"The checkpoint {self._last_checkpoint} lacks what `save_only_model` leaves out. These start "
                        f"anew: {', '.join(left_out)}."
                    )
            save_only_model = self.args.save_only_model
            try:
                return super().train(self._last_checkpoint, *args, **kwargs)
            finally:  # what a run that must end has set, in order to be resumed
                self.args.save_only_model, self._is_ending = save_only_model, False

    @contextlib.contextmanager
    def locking_output_dir(self) -> Iterator[None]:
        """
        Keep other runs out of `output_dir`, until the process ends at the latest. All ranks make this call together.

        The main process holds it, unless another run of this host does (`InputError`). On a disk that several hosts
        share, runs of other hosts may not see that.
        """
        if self._has_locked_output_dir:
            yield
            return
        lock = RunLock(self.args.output_dir)
        conflict = lock.acquire() if self.is_world_process_zero() else None
        conflict, self._run_id = gather_object([(conflict, uuid.uuid4().hex[:8])])[0]
        if conflict is not None:
            raise InputError(conflict)
        self._has_locked_output_dir = True
        try:
            yield
        finally:
            self._has_locked_output_dir = False
            lock.release()

    def save_for_resume(self) -> str | None:
        """
        Save a checkpoint of the latest update in a run that must end, between two updates, unless it has one; whatever
        `save_strategy` and `save_only_model` are. All ranks make this call together.

        Return the folder of the run's last checkpoint; `None` without one, before the first update.
        """
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        has_it = self._last_checkpoint is not None and os.path.basename(self._last_checkpoint) == name
        if self.is_in_train and self.state.global_step > 0 and not has_it:
            self.args.save_only_model, self._is_ending = False, True
            self._save_checkpoint(self.model, trial=None)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        return self._last_checkpoint

    def checkpoint_to_resume(self, resume_from_checkpoint: str | bool | None) -> str | None:
        """
        Return the folder to resume from, the same on all ranks; `None` for a run from the start.

        `True` asks for the newest checkpoint in `output_dir` that is complete on every rank, with a warning for each
        newer one. A folder that is not complete, or none that is, is an `InputError`.
        """
        if not resume_from_checkpoint:
            return None
        run_dir = self.args.output_dir
        if resume_from_checkpoint is not True:
            defect = self._defect_on_any_rank(resume_from_checkpoint)
            if defect is not None:
                has_manifest = os.path.isfile(os.path.join(resume_from_checkpoint, MANIFEST))
                changed = f" If the files were changed on purpose, remove {MANIFEST} there." if has_manifest else ""
                raise InputError(
                    f"The checkpoint {resume_from_checkpoint} is not complete: {defect}. Resume from another one "
                    f"(`True`, in the script `true`, takes the newest that is complete).{changed}"
                )
            return resume_from_checkpoint
        skipped = []
        for name in reversed(on_main_process(lambda: checkpoint_names(run_dir))):
            folder = os.path.join(run_dir, name)
            defect = self._defect_on_any_rank(folder)
            if defect is None:
                return folder
            skipped.append(f"{folder} is not complete and was skipped: {defect}.")
            if self.is_world_process_zero():
                warnings.warn(skipped[-1])
        found = f"No valid checkpoint found in output directory ({run_dir}): start without `resume_from_checkpoint`."
        raise InputError("\n".join([found, *skipped]))

    def _defect_on_any_rank(self, folder: str) -> str | None:
        defects = gather_object([find_defect(folder, self._is_dispensable)])
        return next((defect for defect in defects if defect is not None), None)

    def _is_dispensable(self, file: str) -> bool:
        """Whether a run can be resumed without this file of a checkpoint."""
        return False

    def _get_output_dir(self, *args, **kwargs):
        run_dir = super()._get_output_dir(*args, **kwargs)
        return self._unfinished(run_dir) if self._is_saving else run_dir

    def _unfinished(self, run_dir: str) -> str:
        return os.path.join(run_dir, f"{UNFINISHED}-{self._run_id}-{self._num_saves}")

    def _push_from_checkpoint(self, checkpoint_folder, *args, **kwargs):
        if not (self._is_saving or self._is_ending or is_stopped(self)):
            super()._push_from_checkpoint(checkpoint_folder, *args, **kwargs)

    def _save_checkpoint(self, model, trial, *args, **kwargs):
        run_dir, name = self._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        folder, is_owner = os.path.join(run_dir, name), self.args.should_save
        self._num_saves += 1
        unfinished = self._unfinished(run_dir)
        is_sharded = self.is_deepspeed_enabled or self.is_fsdp_enabled
        # In the parents' save, ranks may wait for one that fails, which cannot tell them. The launcher ends them.
        fails_alone = self.accelerator.num_processes > 1 and (is_sharded or bool(self.state.best_global_step))
        with _failing_together(run_dir, name, fails_alone):
            self._is_saving = True
            try:
                super()._save_checkpoint(model, trial, *args, **kwargs)
            finally:
                self._is_saving = False
            self._record_best(run_dir, name)
        with _failing_together(run_dir, name):  # all ranks have written
            if is_owner:
                write_manifest(os.path.join(unfinished, name))
            if self.is_local_process_zero() and os.path.isdir(unfinished):  # a node may have files in its memory alone
                flush_tree(unfinished)
        with _failing_together(run_dir, name):
            if is_owner:
                move_into_place(unfinished, folder)
                rotate(unfinished, folder, self.args.save_total_limit, self.state.best_model_checkpoint)
        # From here on, the folder is there for all ranks
        if self.is_local_process_zero() and not is_owner:  # on a disk of its own
            shutil.rmtree(unfinished, ignore_errors=True)
        if not self.args.save_only_model:
            self._last_checkpoint = folder
        if self.args.push_to_hub:
            with raising_on_all_ranks():
                self._push_from_checkpoint(folder)

    def _record_best(self, run_dir: str, name: str) -> None:
        # The parent did, but looked for it, and found this one, in `_unfinished-ID`
        best_name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
        best = os.path.join(run_dir, best_name)
        if best == self.state.best_model_checkpoint or not (best_name == name or os.path.isdir(best)):
            return
        self.state.best_model_checkpoint = best
        if self.args.should_save:
            self.state.save_to_json(os.path.join(self._unfinished(run_dir), name, TRAINER_STATE_NAME))


@contextlib.contextmanager
def _failing_together(run_dir: str, name: str, fails_alone: bool = False) -> Iterator[None]:
    """
    Wait for all ranks at the end of a part of a save, and raise on all of them what one failed with.

    A note on the error says how to resume. If it `fails_alone`, a rank raises at once.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        caught.add_note(_explain(caught, run_dir, name))
        if fails_alone:
            raise
        error = caught
    raise_on_all_ranks(error)


def _explain(error: Exception, run_dir: str, name: str) -> str:
    """Return what an error of a save means: which checkpoint is complete, how to resume, how much room there is."""
    before = [each for each in reversed(checkpoint_names(run_dir)) if each != name]
    complete = next((each for each in before if find_defect(os.path.join(run_dir, each)) is None), None)
    room = ""
    if _found_no_room(error):
        usage = shutil.disk_usage(run_dir)
        room = (
            f", where {usage.free / 1e6:,.0f} MB of {usage.total / 1e6:,.0f} MB are free. If the disk is full, make "
            "room, for one checkpoint more than `save_total_limit`"
        )
    resume = "No checkpoint is there to resume from: the run has to begin anew."
    if complete is not None:
        continued = "Resume with `resume_from_checkpoint=True` (in the script, `true`)."
        resume = f"{complete}, saved before, is complete. {continued}"
    return f"{name} could not be saved in {run_dir}{room}. {resume}"


def _found_no_room(error: Exception) -> bool:
    """Whether a disk or a quota is full, or a file would be too large for the file system."""
    return isinstance(error, OSError | RuntimeError | SafetensorError) and any(
        getattr(each, "errno", None) in _NO_ROOM or any(text in str(each) for text in _NO_ROOM_TEXTS)
        for each in (error, error.__cause__, error.__context__)
    )
