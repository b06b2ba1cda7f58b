"""How fast a run goes, and how long it will take."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """
    Speed of a run at one of its log lines.

    Attributes:
        seconds (`float`): Mean time of an update since the last line, in seconds, with its share of the generation.
        tokens_per_second (`float`, *optional*): Prompt and completion tokens of all processes, over the time since the
            line that counted them last; `None` if there was no generation since.
        seconds_left (`float`, *optional*): What the other updates take at the mean speed since the start; `None` if
            their number is not known.
    """

    seconds: float
    tokens_per_second: float | None
    seconds_left: float | None


class Stopwatch:
    """Measures the pace from line to line."""

    def __init__(self, step: int, tokens: float, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._first = self._last = (step, clock())
        self._last_tokens = (tokens, clock())

    def read(self, step: int, max_steps: int, tokens: float | None = None) -> Pace | None:
        """
        Return the pace, or `None` if there was no update since the last line.

        Args:
            step (`int`): Number of updates so far.
            max_steps (`int`): Number of updates of the run; 0 or less if it is not known.
            tokens (`float`, *optional*): Number of tokens so far, if it was counted since the last line.
        """
        now = self._clock()
        (first_step, start), (last_step, last) = self._first, self._last
        if step <= last_step:
            return None
        self._last = (step, now)
        speed = None
        if tokens is not None and now > self._last_tokens[1]:
            speed = (tokens - self._last_tokens[0]) / (now - self._last_tokens[1])
            self._last_tokens = (tokens, now)
        left = (max_steps - step) * (now - start) / (step - first_step) if max_steps > 0 else None
        return Pace((now - last) / (step - last_step), speed, left)
