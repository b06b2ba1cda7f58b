"""Checkpoints that are whole or not there, whenever the processes are killed and whatever they are saving.

Invariant: a folder `checkpoint-N` holds all files of its manifest. It is written in `_unfinished-ID`, with an id of
the save, flushed to the disk and renamed; one that has to go is renamed back to there and then deleted. The folder is
deleted at the end of a save, and a folder of checkpoints has one live run: if one is found, it was left by a save that
did not end or by files that could not be deleted, and is removed. If that save had made room for a new checkpoint of
the same name, the new one gets the name first. Neither transformers nor an upload to the Hub takes it, or what is in
it, for a checkpoint.
"""

import contextlib
import errno
import os
import re
import shutil
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from accelerate.utils import gather_object
from safetensors import SafetensorError
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints
from trl import GRPOTrainer

from ..errors import InputError
from . import files
from .files import MANIFEST, checkpoint_names, find_defect, left_out_states, step_of, write_manifest
from .rank_errors import raise_on_all_ranks, raising_on_all_ranks
from .run_lock import RunLock
from .stop_signals import is_stopped


UNFINISHED = "_unfinished"  # begin of the folder's name
_OLD = "old-"  # before the name of a checkpoint that has to go

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What these become where safetensors writes, and any error of a write where torch does
_NO_ROOM_TEXTS = (*map(os.strerror, _NO_ROOM), "iostream error", "file write failed")


class WholeCheckpoints(GRPOTrainer):
    """
    A trainer whose checkpoints are whole or not there. All that it overrides is of [`~transformers.Trainer`].

    - `_save_checkpoint`: lets the parents write into `_unfinished-ID`, where their rotation finds one checkpoint and
      leaves it; then renames, pushes and rotates.
    - `_maybe_log_save_evaluate`: takes note of the random state, for a save later on.
    - `create_model_card`: warns where it cannot be written.
    - `_get_output_dir`, `_push_from_checkpoint`: send the parents there meanwhile, and hold back their push; that of
      the checkpoint with which a signal stops the run for good.
    - `_finalize_training`: with `save_total_limit` 1, deletes all but the best checkpoint before the parents do.
    - `train`: refuses an `output_dir` of another live run; resumes from whole checkpoints only, with a warning from
      those of the model alone.
    """

    _run_id = "0" * 8  # of the latest run, the same on all ranks
    _num_unfinished = 0  # folders that this run has made to save in: each has a name of its own
    _holds_output_dir = False

    _is_saving = False
    _is_ending = False  # with a checkpoint to be resumed from, which is not pushed
    _last_checkpoint: str | None = None  # of this run: saved by it, not the model alone, or resumed from
    _random_state: torch.Tensor | None = None  # at the end of the latest update, when transformers saves

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        with self.holding_output_dir():
            self._remove_unfinished(self.args.output_dir)
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
    def holding_output_dir(self) -> Iterator[None]:
        """
        Keep other runs out of `output_dir`, until the process ends at the latest. All ranks make this call together.

        The main process holds it, unless another run of this host does (`InputError`). On a disk that several hosts
        share, runs of other hosts may not see that.
        """
        if self._holds_output_dir:
            yield
            return
        lock = RunLock(self.args.output_dir)
        refusal = lock.acquire() if self.is_world_process_zero() else None
        refusal, self._run_id = gather_object([(refusal, uuid.uuid4().hex[:8])])[0]
        if refusal is not None:
            raise InputError(refusal)
        self._holds_output_dir = True
        try:
            yield
        finally:
            self._holds_output_dir = False
            lock.release()

    def _maybe_log_save_evaluate(self, *args, **kwargs):
        self._random_state = torch.get_rng_state()  # the evaluation may end the run
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self._random_state = torch.get_rng_state()

    def save_for_resume(self) -> str | None:
        """
        Save a checkpoint of the latest update in a run that must end, between two updates, unless it has one; whatever
        `save_strategy` and `save_only_model` are. All ranks make this call together.

        Return the folder of the run's last checkpoint; `None` without one, before the first update.
        """
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        has_it = self._last_checkpoint is not None and os.path.basename(self._last_checkpoint) == name
        if self.is_in_train and self.state.global_step > 0 and not has_it:
            if self._random_state is not None:  # an epoch that began since has drawn from it
                torch.set_rng_state(self._random_state)
            self.args.save_only_model, self._is_ending = False, True
            self._save_checkpoint(self.model, trial=None)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        return self._last_checkpoint

    def checkpoint_to_resume(self, resume_from_checkpoint: str | bool | None) -> str | None:
        """
        Return the folder to resume from, the same on all ranks; `None` for a run from the start.

        `True` asks for the newest checkpoint in `output_dir` that is whole on every rank, with a warning for each
        newer one. A folder that is not whole, none that is, or one that another run holds, is an `InputError`.
        """
        if resume_from_checkpoint is None or resume_from_checkpoint is False:
            return None
        run_dir = self.args.output_dir
        with self.holding_output_dir():
            self._remove_unfinished(run_dir)
        if resume_from_checkpoint is not True:
            defect = self._defect_on_any_rank(resume_from_checkpoint)
            if defect is not None:
                has_manifest = os.path.isfile(os.path.join(resume_from_checkpoint, MANIFEST))
                changed = f" If the files were changed on purpose, remove {MANIFEST} there." if has_manifest else ""
                raise InputError(
                    f"The checkpoint {resume_from_checkpoint} is not whole: {defect}. Resume from another one "
                    f"(`True`, in the script `true`, takes the newest that is whole).{changed}"
                )
            return resume_from_checkpoint
        skipped = []
        with raising_on_all_ranks():
            names = checkpoint_names(run_dir)
        for name in sorted(set(gather_object(names)), key=step_of, reverse=True):
            folder = os.path.join(run_dir, name)
            defect = self._defect_on_any_rank(folder)
            if defect is None:
                return folder
            skipped.append(f"{folder} is not whole and was skipped: {defect}.")
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
        number = (int(self._run_id, 16) + self._num_unfinished) % 16**8
        return os.path.join(run_dir, f"{UNFINISHED}-{number:08x}")

    def create_model_card(self, model_name=None, dataset_name=None, *args, **kwargs):  # type: ignore[override]
        try:
            super().create_model_card(model_name, dataset_name, *args, **kwargs)
            if self.is_world_process_zero():
                self._rewrite_model_card(model_name, dataset_name)
        except OSError as error:  # raised by one rank within a save, it would keep the others waiting
            warnings.warn(f"The model card could not be written: {error}")

    def _rewrite_model_card(self, model_name: str | None, dataset_name: str | None) -> None:
        """Write another card in the place of TRL's. A hook, called on the main process."""

    def _push_from_checkpoint(self, checkpoint_folder, *args, **kwargs):
        if not (self._is_saving or self._is_ending or is_stopped(self)):
            super()._push_from_checkpoint(checkpoint_folder, *args, **kwargs)

    def _save_checkpoint(self, model, trial, *args, **kwargs):
        run_dir, name = self._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        self._num_unfinished += 1  # files that could not be deleted may have kept the one before
        unfinished, folder = os.path.join(self._unfinished(run_dir), name), os.path.join(run_dir, name)
        is_owner = self._make_unfinished(run_dir, name)
        with self._failing_together(run_dir, name, self._waits_within_a_save):
            self._is_saving = True
            try:
                super()._save_checkpoint(model, trial, *args, **kwargs)
            finally:
                self._is_saving = False
            self._record_best(run_dir, name)
        # All ranks have written
        with self._failing_together(run_dir, name):
            if is_owner and os.path.isdir(unfinished):  # not so on a node that saves nothing on a disk of its own
                write_manifest(unfinished)
            if self.is_local_process_zero():  # on each node: what it wrote may be in its memory alone
                files.flush_tree(self._unfinished(run_dir))
        with self._failing_together(run_dir, name):
            if is_owner and os.path.isdir(unfinished):
                _finish(unfinished, folder)
        # From here on, the folder is there for all ranks
        if not self.args.save_only_model:
            self._last_checkpoint = folder
        if self.args.push_to_hub:
            with self._failing_together(run_dir, name, is_push=True):  # which copies the weights into the run's folder
                self._push_from_checkpoint(folder)
        if is_owner:
            _rotate(self._unfinished(run_dir), folder, self.args.save_total_limit, self.state.best_model_checkpoint)

    @contextlib.contextmanager
    def _failing_together(
        self, run_dir: str, name: str, waits_within: bool = False, is_push: bool = False
    ) -> Iterator[None]:
        """
        Wait for all ranks at the end, and raise on all of them what one failed with; otherwise they would wait for it.

        An error says which checkpoint is whole, and how to resume. A rank that fails while others may wait for it
        within (`waits_within`) cannot tell them. It raises alone, and the launcher ends them.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = _explained(caught, run_dir, name, is_push)
            if waits_within:
                raise error from caught
        self.accelerator.wait_for_everyone()
        raise_on_all_ranks(error)

    @property
    def _waits_within_a_save(self) -> bool:
        """Whether the ranks wait for one another in the parents' save."""
        is_sharded = self.is_deepspeed_enabled or self.is_fsdp_enabled
        return self.accelerator.num_processes > 1 and (is_sharded or bool(self.state.best_global_step))

    def _finalize_training(self, trial, *args, **kwargs):
        # The parents would delete these file by file under their own names.
        self._num_unfinished += 1
        if self.args.should_save and self.args.save_total_limit == 1 and self.state.best_model_checkpoint is not None:
            run_dir = self._get_output_dir(trial)
            best = os.path.join(run_dir, os.path.basename(self.state.best_model_checkpoint))
            if os.path.isdir(best):
                _rotate(self._unfinished(run_dir), newest=best, limit=1, best=best)
        return super()._finalize_training(trial, *args, **kwargs)

    def _remove_unfinished(self, run_dir: str) -> None:
        with raising_on_all_ranks():
            for unfinished in sorted(Path(run_dir).glob(f"{UNFINISHED}-*")) if self.is_local_process_zero() else ():
                with contextlib.suppress(FileNotFoundError):  # another node, which shares the folder, was faster
                    if _is_left_by_a_save(unfinished):
                        _finish_replacement(unfinished)
                        names = sorted(os.listdir(unfinished))
                        if _remove(unfinished):
                            left_by = f"left by a save that did not end, with {len(names)} in it: {names}"
                            warnings.warn(f"Removed {unfinished}, {left_by}.")

    def _make_unfinished(self, run_dir: str, name: str) -> bool:
        """Make `_unfinished-ID`; return whether this rank made it: of ranks that share a file system, one does."""
        unfinished = self._unfinished(run_dir)
        is_owner = False
        is_main = self.is_world_process_zero()
        for is_my_turn in (is_main, not is_main):
            with self._failing_together(run_dir, name):
                if is_my_turn and self.is_local_process_zero():
                    os.makedirs(run_dir, exist_ok=True)
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(unfinished)
                        is_owner = True
        return is_owner

    def _record_best(self, run_dir: str, name: str) -> None:
        # The parent did, but looked for it, and found this one, in `_unfinished-ID`.
        best_name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
        best = os.path.join(run_dir, best_name)
        if best == self.state.best_model_checkpoint or not (best_name == name or os.path.isdir(best)):
            return
        self.state.best_model_checkpoint = best
        if self.args.should_save:
            self.state.save_to_json(os.path.join(self._unfinished(run_dir), name, TRAINER_STATE_NAME))


def _explained(error: Exception, run_dir: str, name: str, is_push: bool) -> Exception:
    """
    Return an error of a save that says which checkpoint is whole and how to resume.

    It is the error itself with a note. Where a write found no room, whichever library writes, it is an `OSError` that
    says how much there is.
    """
    before = sorted((each for each in checkpoint_names(run_dir) if is_push or each != name), key=step_of, reverse=True)
    whole = next((each for each in before if find_defect(os.path.join(run_dir, each)) is None), None)
    resume = (
        "No checkpoint is there to resume from: the run has to begin anew."
        if whole is None
        else f"{whole}, saved before, is whole. Resume with `resume_from_checkpoint=True` (in the script, `true`)."
    )
    failed = f"{name} could not be {'pushed from' if is_push else 'saved in'} {run_dir}"
    if not _found_no_room(error):
        error.add_note(f"{failed}. {resume}")
        return error
    there = next(folder for folder in (Path(run_dir), *Path(run_dir).absolute().parents) if folder.is_dir())
    usage = shutil.disk_usage(there)
    room = f"one checkpoint more than `save_total_limit`{' and a copy of the weights' if is_push else ''}"
    full = OSError(
        f"{failed}, where {usage.free / 1e6:,.0f} MB of {usage.total / 1e6:,.0f} MB are free: {error}. If the disk is "
        f"full, make room, for {room}. {resume}"
    )
    full.errno, full.__cause__ = getattr(error, "errno", None), error
    return full


def _found_no_room(error: Exception) -> bool:
    """Whether a disk or a quota is full, or a file would be too large for the file system."""
    if not isinstance(error, OSError | RuntimeError | SafetensorError):
        return False
    return any(
        getattr(each, "errno", None) in _NO_ROOM or any(text in str(each) for text in _NO_ROOM_TEXTS)
        for each in (error, error.__cause__, error.__context__)
    )


def _finish(unfinished: str, folder: str) -> None:
    """Give a checkpoint its name. All of it is on the disk."""
    if os.path.isdir(folder):  # of an earlier run
        _move_away(folder, os.path.dirname(unfinished))
    os.rename(unfinished, folder)
    files.flush(os.path.dirname(folder))


def _is_left_by_a_save(folder: Path) -> bool:
    """Whether a folder looks like it: by its name, and with checkpoints alone in it. Others are the user's."""
    return (
        re.fullmatch(rf"{UNFINISHED}-[0-9a-f]{{8}}", folder.name) is not None
        and folder.is_dir()
        and all(re.fullmatch(rf"({_OLD})?{PREFIX_CHECKPOINT_DIR}-\d+", each.name) for each in folder.iterdir())
    )


def _finish_replacement(unfinished: Path) -> None:
    """Give a checkpoint its name, where a save was killed between moving the old one away and naming the new one."""
    for name in os.listdir(unfinished):
        new, old, folder = unfinished / name, unfinished / f"{_OLD}{name}", unfinished.parent / name
        if os.path.isdir(old) and not os.path.isdir(folder):
            os.rename(new, folder)


def _rotate(unfinished: str, newest: str, limit: int | None, best: str | None) -> None:
    """
    Delete the folder `_unfinished-ID`, and the checkpoints beyond the limit: the oldest, but for the newest and best.

    The choice is that of transformers' `rotate_checkpoints`. That deletes them file by file under their own names:
    killed within, it leaves parts of one. These are the last to be modified, so that its next rotation would keep
    them in place of a whole one. What cannot be deleted is warned of: the checkpoint is saved, and the run goes on.
    """
    if limit is not None and limit > 0:
        checkpoints = [
            os.path.normpath(path) for path in sort_checkpoints(os.path.dirname(unfinished), use_mtime=True)
        ]
        kept = {os.path.normpath(path) for path in (newest, best) if path is not None}
        surplus = max(0, len(checkpoints) - limit)
        for folder in [path for path in checkpoints if path not in kept][:surplus]:
            try:
                os.makedirs(unfinished, exist_ok=True)
                _move_away(folder, unfinished)
            except OSError as error:
                warnings.warn(f"{folder} is beyond `save_total_limit`, but cannot be deleted: {error}")
    _remove(unfinished)


def _remove(folder: str | Path) -> bool:
    """Delete what can be deleted of a folder, warn of the rest, and return whether nothing is left."""
    with contextlib.suppress(OSError):
        shutil.rmtree(folder, ignore_errors=True)
    left = [os.path.join(place, name) for place, _, names in os.walk(folder) for name in names]
    if os.path.lexists(folder):  # NFS keeps a file, as `.nfs...`, until no process has it open
        warnings.warn(
            f"{folder} cannot be deleted, with {len(left)} files in it{f', such as {left[0]}' if left else ''}. No "
            "run reads it: delete it when no process uses it."
        )
    return not os.path.lexists(folder)


def _move_away(folder: str, unfinished: str) -> None:
    os.rename(folder, os.path.join(unfinished, f"{_OLD}{os.path.basename(folder)}"))
