"""Where the time of a training goes: seconds of each phase of an update, and tokens per second."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from transformers import Trainer, TrainerCallback


PHASES = ("generation", "weights", "scoring", "rewards", "training", "waiting", "other")
"""Phases of an update; `time/NAME` is the metric of each."""

_UNCOUNTED = "uncounted"  # evaluations and saves


class PhaseClock(TrainerCallback):
    """
    Measure the seconds of each phase between the ends of two updates, evaluations and saves excluded.

    Phases do not overlap: a phase within another one pauses it, so the phases of an update add up to its wall time.
    The clock never waits for the device: on a GPU, work counts in the phase in which the host has to wait for it.

    Args:
        log (`Callable`):
            Takes the metrics of an update when it ends.
    """

    def __init__(self, log: Callable[[Mapping[str, float]], None]):
        self._log = log
        self._phase: str | None = None  # outside a training
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._since_rates = 0.0  # seconds of the updates since `rates`
        self._tokens = {"generated": 0, "trained": 0}  # likewise

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

    def timed(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return a function whose calls count as the phase."""

        def within_phase(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return call(*args, **kwargs)

        return within_phase

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
        self._phase, self._since = "other", perf_counter()

    def on_step_begin(self, args, state, control, **kwargs):
        self._switch("training")

    def on_step_end(self, args, state, control, **kwargs):
        self._switch("other")
        self._log({f"time/{name}": seconds for name, seconds in self._seconds.items()})
        self._since_rates += sum(self._seconds.values())
        self._seconds = dict.fromkeys(PHASES, 0.0)

    def on_save(self, args, state, control, **kwargs):
        """Leave out what the callbacks before this one did after the save or the evaluation, such as a report."""
        self._since = perf_counter()

    on_evaluate = on_save

    def on_train_end(self, args, state, control, **kwargs):
        self._phase = None

    def _switch(self, name: str | None) -> None:
        now = perf_counter()
        if self._phase in self._seconds:
            self._seconds[self._phase] += now - self._since
        self._phase, self._since = name, now
