"""Where the time of a training goes: seconds of each phase of an update, and tokens per second."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter, process_time
from typing import Any

from transformers import Trainer, TrainerCallback

from .batch.log_values import add_values


PHASES = ("generation", "weights", "scoring", "rewards", "training", "waiting", "other")
"""Phases of an update; `time/NAME` is the metric of each."""

_UNCOUNTED = "uncounted"  # evaluations and saves


class PhaseClock(TrainerCallback):
    """
    Log the seconds of each phase between the ends of two updates, evaluations and saves excluded.

    Phases do not overlap: a phase within another one pauses it, so the phases of an update add up to its wall time.
    The clock never waits for the device: on a GPU, work counts in the phase in which the host has to wait for it.

    With `logs_totals`, each log of updates has the seconds of the training so far, `clock/wall_s`, and the CPU seconds
    of this process, `clock/cpu_s`. A resumed run continues to count.
    """

    def __init__(self, logs_totals: bool = False):
        self.logs_totals = logs_totals
        self._phase: str | None = None  # outside a training
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._since_rates = 0.0  # seconds of the updates since `rates`
        self._tokens = {"generated": 0, "trained": 0}  # likewise
        self._totals = [0.0, 0.0]  # wall and CPU seconds

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside this context as the phase, less the phases inside it."""
        outer = self._phase
        if outer in (None, _UNCOUNTED):
            yield
            return
        self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    def put_last(self, trainer: Trainer) -> None:
        """Add this callback to a trainer, in place of an earlier clock, after those whose time it leaves out."""
        trainer.pop_callback(PhaseClock)
        trainer.add_callback(self)
        self._metrics: Any = trainer._metrics["train"]  # type: ignore[attr-defined]

    def timed(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return a function whose calls count as the phase."""
        return self.phase(name)(call)

    def pause(self):
        """Count no time inside this context, whatever phases it has."""
        return self.phase(_UNCOUNTED)

    def count(self, **tokens: int) -> None:
        """Add tokens that were `generated` or `trained`, of all ranks."""
        if self._phase not in (None, _UNCOUNTED):
            for name, number in tokens.items():
                self._tokens[name] += number

    def rates(self) -> dict[str, float]:
        """Return the tokens per second of the updates that ended since the last call."""
        seconds, self._since_rates = self._since_rates, 0.0
        if not seconds:
            return {}
        tokens, self._tokens = self._tokens, dict.fromkeys(self._tokens, 0)
        return {f"tokens/{name}_per_s": number / seconds for name, number in tokens.items()}

    def on_train_begin(self, args, state, control, **kwargs):
        logged = [log for log in state.log_history if "clock/wall_s" in log]
        self._totals = [logged[-1][f"clock/{name}_s"] for name in ("wall", "cpu")] if logged else [0.0, 0.0]
        self._phase, self._since = "other", (perf_counter(), process_time())
        self._seconds, self._since_rates = dict.fromkeys(PHASES, 0.0), 0.0
        self._tokens = dict.fromkeys(self._tokens, 0)

    def on_step_begin(self, args, state, control, **kwargs):
        self._switch("training")

    def on_step_end(self, args, state, control, **kwargs):
        self._switch("other")
        add_values(self._metrics, {f"time/{name}": seconds for name, seconds in self._seconds.items()})
        self._since_rates += sum(self._seconds.values())
        self._seconds = dict.fromkeys(PHASES, 0.0)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.logs_totals and state.log_history and "loss" in state.log_history[-1]:
            wall, cpu = (round(seconds, 3) for seconds in self._totals)
            state.log_history[-1] |= {"clock/wall_s": wall, "clock/cpu_s": cpu}

    def on_save(self, args, state, control, **kwargs):
        """Leave out what the callbacks before this one did after the save or the evaluation, such as a report."""
        self._since = perf_counter(), process_time()

    on_evaluate = on_save

    def on_train_end(self, args, state, control, **kwargs):
        self._phase = None

    def _switch(self, name: str | None) -> None:
        now = perf_counter(), process_time()
        if self._phase in self._seconds:
            wall, cpu = (end - start for end, start in zip(now, self._since, strict=True))
            self._seconds[self._phase] += wall
            self._totals = [self._totals[0] + wall, self._totals[1] + cpu]
        self._phase, self._since = name, now


class TimedTrainer(Trainer):
    """Mixin for a trainer of TRL's with a [`PhaseClock`] that leaves out evaluations and saves."""

    def __init__(self, *args, **kwargs):
        self.phase_clock = PhaseClock()
        super().__init__(*args, **kwargs)
        vllm: Any = getattr(self, "vllm_generation", None)
        if vllm is not None:
            vars(vllm)["sync_weights"] = self.phase_clock.timed(vllm.sync_weights, "weights")

    def train(self, *args, **kwargs):
        self.phase_clock.put_last(self)
        return super().train(*args, **kwargs)

    def evaluation_loop(self, *args, **kwargs):
        with self.phase_clock.pause():
            return super().evaluation_loop(*args, **kwargs)

    def _save_checkpoint(self, *args, **kwargs):
        with self.phase_clock.pause():
            super()._save_checkpoint(*args, **kwargs)
