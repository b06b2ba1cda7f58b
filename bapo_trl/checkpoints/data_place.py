"""A run's place in its training data, saved in checkpoints with a fingerprint of the data: one file for all ranks."""

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from xxhash import xxh3_128

from ..errors import InputError
from ..parts import Part
from .rank_errors import on_main_process
from .rank_files import RankFiles


FILES = RankFiles("data place", "1", "resume from another checkpoint")
_HASHED_ROWS = 100


def fingerprint(dataset: Any) -> dict[str, Any]:
    """Return the size, the columns and a hash of some rows of a dataset; of a stream, its features."""
    if not isinstance(dataset, Dataset):
        return {"features": str(getattr(dataset, "features", None))}
    rows = dataset.with_format("arrow")[list(range(0, len(dataset), max(1, len(dataset) // _HASHED_ROWS)))]
    hashed = xxh3_128(str(rows.to_pylist()).encode()).hexdigest()  # Arrow's values: no image is decoded
    return {"rows": len(dataset), "columns": dataset.column_names, "hash": hashed}


class DataPlace(Part, TrainerCallback):
    """
    The passes over the data that a run has finished, and the micro-batches that it has made in the current pass.

    transformers computes both from the number of updates, as if all of them had the size of the current settings.

    Invariant: `passes` and `skipped` are where the run begins, in micro-batches of its own size. A generation that is
    not finished at a checkpoint begins again, unless the resumed run has the same micro-batches.
    """

    def reset(self, run):
        self._trainer = run
        self.passes, self.skipped = 0, 0
        self._passes_begun, self._begin = 0, 0  # the latter is TRL's count of micro-batches at the current pass' start
        self._fingerprint: dict[str, Any] | None = None
        run.pop_callback(DataPlace)  # of an earlier run
        run.add_callback(self)

    def _units(self) -> dict[str, int]:
        """Return what a place is counted in, of all ranks."""
        args = self._trainer.args
        return {
            "prompts": args.generation_batch_size // args.num_generations,  # of a generation
            "micro_batches": args.micro_batches_per_generation,
            "accumulation": args.gradient_accumulation_steps,
        }

    def _data(self) -> dict[str, Any]:
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self._trainer.train_dataset)
        return self._fingerprint

    def on_train_begin(self, args, state, control, **kwargs):
        self._passes_begun, self._begin = self.passes, 0

    def on_epoch_end(self, args, state, control, **kwargs):
        self._passes_begun, self._begin = self._passes_begun + 1, self._trainer._step

    def save(self, folder, clock):
        began = self._trainer.update_began
        is_made = clock.version > began.version  # else a save before the optimizer step, and the update is repeated
        done = (clock if is_made else began).micro_batch - self._begin
        if self._trainer.args.should_save:
            place = {"passes": self._passes_begun, "done": done}
            FILES.write(folder, 0, 1, {**place, "units": self._units(), "data": self._data()})

    def resume(self, values: tuple[int, ...], checkpoint: str) -> tuple[int, ...]:
        """
        Find the place of a checkpoint; return the `values` of transformers with the epochs and updates from there.

        All ranks make this call together. Warns if the data changed, and if prompts are repeated. Raises an
        `InputError` if the data changed and nothing would be trained. Without a saved place, as in a checkpoint of
        another trainer, transformers' place is used.
        """
        epochs, updates_per_pass, *others, length, max_steps = values
        args, has_length = self._trainer.args, isinstance(self._trainer.train_dataset, Dataset)
        update = TrainerState.load_from_json(str(Path(checkpoint, TRAINER_STATE_NAME))).global_step
        path = FILES.path(checkpoint, 0, 1)
        saved, data = on_main_process(lambda: (FILES.read(path), self._data()) if path.exists() else (None, None))
        if saved is None:
            self.passes, updates = divmod(update, updates_per_pass)
            self.skipped, repeated = updates * args.gradient_accumulation_steps, 0
        else:
            self.passes = saved["passes"]
            self.skipped, repeated = self._convert(saved["done"], saved["units"])
        if has_length and self.skipped >= length:
            self.passes, self.skipped, repeated = self.passes + 1, 0, 0
        if has_length:
            done = self.passes * updates_per_pass + self.skipped // args.gradient_accumulation_steps
            if args.max_steps > 0:
                epochs = math.ceil((done + max_steps - update) / updates_per_pass)
            else:
                max_steps += update - done
        if saved is not None and saved["data"] != data:
            self._report_change(checkpoint, saved["data"], data, is_over=update >= max_steps)
        if repeated and self._trainer.accelerator.is_main_process:
            warnings.warn(
                f"The generations of the checkpoint {checkpoint} have {saved['units']['prompts']} prompts, those of "
                f"this run {self._units()['prompts']}: the last {repeated} prompts before the checkpoint are repeated."
            )
        return epochs, updates_per_pass, *others, length, max_steps

    def _convert(self, done: int, units: Mapping[str, int]) -> tuple[int, int]:
        """Return a place in a pass in this run's micro-batches, and the number of prompts that are repeated."""
        own = self._units()
        if units == own:
            return done, 0
        if {**units, "accumulation": own["accumulation"]} == own:
            return done - done % own["accumulation"], 0  # within a generation, whose prompts are sampled again anyway
        prompts = done // units["micro_batches"] * units["prompts"]
        generations, repeated = divmod(prompts, own["prompts"])
        return generations * own["micro_batches"], repeated

    def _report_change(self, checkpoint: str, saved: dict[str, Any], data: dict[str, Any], is_over: bool) -> None:
        names = sorted(name for name in {*saved, *data} - {"hash"} if saved.get(name) != data.get(name))
        changes = [f"{name} {saved.get(name)}, now {data.get(name)}" for name in names] or ["other values in its rows"]
        changed = f"the train dataset is not that of the checkpoint {checkpoint} ({'; '.join(changes)})"
        if is_over:
            raise InputError(
                f"Nothing would be trained: {changed}, and the run's passes or updates over it are over. Raise "
                "`num_train_epochs` or `max_steps`, or start a new run with the checkpoint's folder as the model."
            )
        if self._trainer.accelerator.is_main_process:
            units = self._units()
            skipped = self.skipped // units["micro_batches"] * units["prompts"]
            warnings.warn(
                f"Resumed with other data: {changed}. The run continues in pass {self.passes + 1}, after {skipped} "
                "prompts, which it does not see in this pass. To train on all of them, start a new run with the "
                "checkpoint's folder as the model."
            )
