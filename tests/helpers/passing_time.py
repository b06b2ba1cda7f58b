"""A clock for the phases of a training, in place of the machine's."""

from bapo_trl import phase_clock


class Time:
    """A time that passes only where a test says so."""

    def __init__(self, monkeypatch):
        self.now = self.outside = 0.0  # in all, and in evaluations and saves
        monkeypatch.setattr(phase_clock, "perf_counter", lambda: self.now)

    def passing(self, function, seconds):
        def passes(*args, **kwargs):
            self.now += seconds
            return function(*args, **kwargs)

        return passes

    def passing_outside(self, function):
        def passes(*args, **kwargs):
            start = self.now
            self.now += 1000
            result = function(*args, **kwargs)
            self.outside += self.now - start
            return result

        return passes
