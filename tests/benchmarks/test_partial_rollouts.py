"""The benchmark of partial rollouts: lengths of its model, and its counts."""

import numpy as np
import pytest
import torch

from benchmarks import partial_rollouts
from benchmarks.lognormal_model import lognormal_hazards, lognormal_model, lognormal_tokenizer


def test_hazards_are_those_of_a_lognormal_length():
    alive = np.concatenate([[1.0], (1 - lognormal_hazards(20, 5, 2000)).cumprod(0).numpy()])
    drawn = np.maximum(1, np.round(20 * np.exp(np.random.default_rng(0).normal(0, np.log(5) / 1.6449, 200_000))))
    for length in (1, 7, 20, 100, 300):
        assert alive[length] == pytest.approx((drawn > length).mean(), abs=0.005)


def test_the_model_ends_its_completions_by_these_hazards():
    median, cap, tokenizer = 6, 60, lognormal_tokenizer()
    model = lognormal_model(median, 5, prompt_tokens=8, max_completion_length=cap, hidden=32, layers=1)
    ids = torch.tensor([tokenizer("01234567")["input_ids"] + [5] * (cap - 1)])
    with torch.no_grad():
        logits = model(ids).logits[0, 7:]
    ends = logits.softmax(-1)[:, tokenizer.eos_token_id].double()
    torch.testing.assert_close(ends, lognormal_hazards(median, 5, cap)[: len(ends)], rtol=1e-3, atol=1e-6)
    others = logits.softmax(-1)[:, [i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids]]
    assert (others.std(dim=1) < 1e-6).all()  # the characters alike


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
