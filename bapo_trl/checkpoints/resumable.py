"""Exact resume of a trainer with parts: their states, and the place in the data."""

from typing import Any

from ..parts import Clock, Part
from ..phase_clock import TimedTrainer
from ..upstream import fixes
from .atomic import AtomicCheckpoints
from .data_place import DataPlace
from .rank_errors import raising_on_all_ranks


class ResumableParts(TimedTrainer, AtomicCheckpoints):
    """Mixin that saves the parts of a trainer in its checkpoints, and resumes from the exact place in the data."""

    args: Any
    parts: list[Part]
    first_epoch = 0  # of the run
    prompt_sampler: Any = None  # which shuffles the prompts as in an uninterrupted run

    def __init__(self, *args, **kwargs):
        self.data_place = DataPlace()
        super().__init__(*args, **kwargs)

    def now(self) -> Clock:
        """Return where the run is."""
        place = self._step % self.args.micro_batches_per_generation
        return Clock(self.state.global_step, self._step, place, place % self.args.steps_per_generation == 0)

    def set_initial_training_values(self, *args, **kwargs):
        values = super().set_initial_training_values(*args, **kwargs)
        return values if self._last_checkpoint is None else self.data_place.resume(values, self._last_checkpoint)

    def _init_training_state(
        self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, *args, **kwargs
    ):
        sizes = max_steps, num_update_steps_per_epoch, num_train_epochs
        super()._init_training_state(*sizes, resume_from_checkpoint, *args, **kwargs)
        if resume_from_checkpoint is not None:
            fixes.restore_callbacks(self)
        epochs, skipped = self.data_place.passes, 0 if self.args.ignore_data_skip else self.data_place.skipped
        if self.state.global_step >= max_steps:  # within an epoch, transformers would run one more update
            epochs, skipped = num_train_epochs, 0
        # TRL's sampler repeats the prompts of a generation step for each of its micro-batches. If TRL's count started
        # at 0 here, generation steps would not align with these blocks, and the next resume would lose prompts.
        self._step, self.first_epoch = skipped, epochs
        fixes.skip_shuffles(self.prompt_sampler, epochs)
        return epochs, skipped

    def _is_dispensable(self, file):
        return any(part.dispensable(file) for part in self.parts)

    def _save_optimizer_and_scheduler(self, output_dir, *args, **kwargs):
        super()._save_optimizer_and_scheduler(output_dir, *args, **kwargs)
        for part in self.parts:
            part.save(output_dir, self.now())

    def _load_from_checkpoint(self, resume_from_checkpoint, *args, **kwargs):
        with fixes.keeping_frozen(self.model), fixes.keeping_types(self.model):
            super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)
            fixes.load_trained_adapter(self, resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint, *args, **kwargs):
        fixes.load_onto_numbered_cpus()
        with fixes.checking_optimizer(self, checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint, *args, **kwargs)
        if checkpoint is None:
            return
        with raising_on_all_ranks():  # each rank reads its own files
            for part in self.parts:
                part.load(checkpoint)
        for part in self.parts:
            part.load_together(checkpoint)
