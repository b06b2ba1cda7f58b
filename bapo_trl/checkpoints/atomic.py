"""Atomic checkpoints: a checkpoint is either complete or does not exist, even if a save is killed at any moment.

Invariant: a folder `checkpoint-N` has all files of its manifest. A checkpoint is written in `_unfinished-ID`, with an
id of the save, flushed to the disk and then renamed. To delete a checkpoint, it is first moved back to that folder.
`_unfinished-ID` is deleted at the end of a save, and only one live run uses a folder of checkpoints: if an old one is
found, it was left over from an interrupted save, or has files that could not be deleted, and is removed. Neither
transformers nor an upload to the Hub treats it, or its contents, as a checkpoint.
"""

import contextlib
import os
import shutil
import uuid
import warnings
from collections.abc import Iterator
from functools import partial

from accelerate.utils import gather_object, is_peft_model
from transformers import PreTrainedModel
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy
from trl import GRPOTrainer

from ..errors import InputError
from ..inputs.generation_config import check_can_be_saved
from .adapters import check_adapters, save_adapter_configs
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
from .rank_errors import on_main_process, raising_on_all_ranks
from .run_lock import RunLock
from .stop_signals import is_stopped


class AtomicCheckpoints(GRPOTrainer):
    """
    Mixin for atomic checkpoints. It overrides only methods of [`~transformers.Trainer`].

    In a save, the parent classes write into `_unfinished-ID`, where their rotation finds just one checkpoint and keeps
    it. Then the mixin renames, rotates and pushes the checkpoint.
    """

    model: PreTrainedModel

    _run_id = ""  # of the latest run, the same on all ranks
    _num_saves = 0  # each save has its own folder, since files that cannot be deleted may keep an earlier one
    _has_locked_output_dir = False

    _is_saving = False
    _is_ending = False  # while saving a last checkpoint to resume from, which is not pushed
    _last_checkpoint: str | None = None  # saved by this run, with more than the model, or resumed from

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        if self.args.save_strategy != SaveStrategy.NO and not is_peft_model(self.model):
            check_can_be_saved(self.model.generation_config)
        with self.locking_output_dir():
            with raising_on_all_ranks():
                if self.is_local_process_zero():
                    remove_left_behind(self.args.output_dir)
            self._last_checkpoint = self.checkpoint_to_resume(resume_from_checkpoint)
            with raising_on_all_ranks():
                check_adapters(self, self._last_checkpoint)
            if self._last_checkpoint is not None and self.is_world_process_zero():
                left_out = left_out_states(self._last_checkpoint)
                if left_out:
                    warnings.warn(
                        f"The checkpoint {self._last_checkpoint} lacks the states that `save_only_model` leaves out. "
                        f"These start from scratch: {', '.join(left_out)}."
                    )
            save_only_model = self.args.save_only_model
            try:
                return super().train(self._last_checkpoint, *args, **kwargs)
            finally:  # `save_for_resume` may have changed both
                self.args.save_only_model, self._is_ending = save_only_model, False

    @contextlib.contextmanager
    def locking_output_dir(self) -> Iterator[None]:
        """
        Lock `output_dir` against other runs inside this context. All ranks make this call together.

        The main process takes the lock; if another run on this host has it, this raises an `InputError`. The lock ends
        with the process at the latest. Runs on other hosts that share the disk may not see the lock.
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
        Save a checkpoint of the latest update, unless it has one, in a run that must end, whatever `save_strategy` and
        `save_only_model` are. All ranks make this call together, between two updates.

        Return the folder of the run's last checkpoint, or `None` if there is none, as before the first update.
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
        Return the folder to resume from, the same on all ranks; `None` for a new run.

        `True` selects the newest checkpoint in `output_dir` that is complete on every rank, with a warning for each
        newer one. Raises an `InputError` if the given folder is not complete, or no folder is.
        """
        if not resume_from_checkpoint:
            return None
        run_dir = self.args.output_dir
        if resume_from_checkpoint is not True:
            defect = self._defect_on_any_rank(resume_from_checkpoint)
            if defect is not None:
                has_manifest = os.path.isfile(os.path.join(resume_from_checkpoint, MANIFEST))
                changed = f" If you changed its files on purpose, remove {MANIFEST} there." if has_manifest else ""
                raise InputError(
                    f"The checkpoint {resume_from_checkpoint} is not complete: {defect}. Resume from another one "
                    f"(`True`, on the command line `true`, takes the newest that is complete).{changed}"
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
        failing_together = partial(raising_on_all_ranks, partial(_explain, run_dir, name))
        # In the parents' save, ranks may wait for a failed rank that cannot notify them
        fails_alone = self.accelerator.num_processes > 1 and (is_sharded or bool(self.state.best_global_step))
        with failing_together(at_once=fails_alone):
            self._is_saving = True
            try:
                super()._save_checkpoint(model, trial, *args, **kwargs)
            finally:
                self._is_saving = False
            self._record_best(run_dir, name)
        with failing_together():  # all ranks have written
            if is_owner:
                save_adapter_configs(self.model, os.path.join(unfinished, name))
                write_manifest(os.path.join(unfinished, name))
            if self.is_local_process_zero() and os.path.isdir(unfinished):  # they may be in this node's memory only
                flush_tree(unfinished)
        with failing_together():
            if is_owner:
                move_into_place(unfinished, folder)
                rotate(unfinished, folder, self.args.save_total_limit, self.state.best_model_checkpoint)
        # From here on, the folder exists for all ranks
        if self.is_local_process_zero() and not is_owner:  # a node with its own disk
            shutil.rmtree(unfinished, ignore_errors=True)
        if not self.args.save_only_model:
            self._last_checkpoint = folder
        if self.args.push_to_hub:
            with raising_on_all_ranks():
                self._push_from_checkpoint(folder)

    def _record_best(self, run_dir: str, name: str) -> None:
        # The parent class records the best checkpoint, but looks for it in `_unfinished-ID`
        best_name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
        best = os.path.join(run_dir, best_name)
        if best == self.state.best_model_checkpoint or not (best_name == name or os.path.isdir(best)):
            return
        self.state.best_model_checkpoint = best
        if self.args.should_save:
            self.state.save_to_json(os.path.join(self._unfinished(run_dir), name, TRAINER_STATE_NAME))


def _explain(run_dir: str, name: str) -> str:
    """Return a note on a failed save: the last complete checkpoint, and how to resume."""
    before = [each for each in reversed(checkpoint_names(run_dir)) if each != name]
    complete = next((each for each in before if find_defect(os.path.join(run_dir, each)) is None), None)
    if complete is None:
        return f"{name} could not be saved in {run_dir}. There is no checkpoint to resume from: start the run again."
    return (
        f"{name} could not be saved in {run_dir}. {complete}, saved before, is complete: resume with "
        "`resume_from_checkpoint=True` (on the command line, `true`)."
    )
