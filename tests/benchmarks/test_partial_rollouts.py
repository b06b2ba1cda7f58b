"""The benchmark of partial rollouts: lengths of its model, and its counts."""

import numpy as np
import pytest

from benchmarks import partial_rollouts
from benchmarks.lognormal_model import lognormal_hazards


def test_hazards_are_those_of_a_lognormal_length():
    alive = np.concatenate([[1.0], (1 - lognormal_hazards(20, 5, 2000)).cumprod(0).numpy()])
    drawn = np.maximum(1, np.round(20 * np.exp(np.random.default_rng(0).normal(0, np.log(5) / 1.6449, 200_000))))
    for length in (1, 7, 20, 100, 300):
        assert alive[length] == pytest.approx((drawn > length).mean(), abs=0.005)


def test_a_run_is_counted(monkeypatch):
    """The counts of a short run, against the lengths that went to training."""
    monkeypatch.setattr(partial_rollouts, "GROUPS", 4)
    monkeypatch.setattr(partial_rollouts, "COMPLETIONS", 2)
    monkeypatch.setattr(partial_rollouts, "WARMUP", 1)
    made = []

    class Keeping(partial_rollouts.Counting):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.lengths = []
            made.append(self)

        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            self.lengths.append(output["completion_mask"].sum(dim=1).tolist())
            return output

    monkeypatch.setattr(partial_rollouts, "Counting", Keeping)
    synchronous = partial_rollouts.measure(1.0, 0.25, 4, 2, {})
    (lengths,) = (trainer.lengths[1:] for trainer in made)
    assert synchronous["steps"] == sum(map(max, lengths)) / 16
    assert synchronous["idle"] == sum(max(row) - length for row in lengths for length in row) / 16
    partial = partial_rollouts.measure(1.5, 0.5, 4, 2, {})
    calls = [call for generation in made[1].calls[1:] for call in generation]
    assert {call.longest for call in calls} <= {1, 2}
    assert made[1].calls[0][0].rows == 8
    slots = sum(calls[0].rows * sum(call.longest for call in calls) for calls in made[1].calls[1:])
    assert partial["idle"] == (slots - sum(call.tokens for call in calls)) / 16
