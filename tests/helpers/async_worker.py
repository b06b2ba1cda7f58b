"""Trains the asynchronous trainer on two ranks, and compares its bounds with those of a slow search over both."""

import sys
from pathlib import Path

import pytest
from accelerate import PartialState

from bapo_trl.clip_bounds import BoundGrid
from bapo_trl.upstream.fixes import end_training
from tests.experimental.test_async_bapo import trained, weighed_tokens
from tests.helpers import oracle
from tests.helpers.asynchronous import scripted_samples
from tests.helpers.toy import toy_model


def main(out: str) -> None:
    samples = scripted_samples(toy_model(), 32)
    folder = Path(out) / str(PartialState(cpu=True).process_index)
    model, grid = toy_model(), BoundGrid()
    exact = weighed_tokens(model, samples[:8])
    batches = [weighed_tokens(model, part) for part in (samples[:8], samples[8:16])]
    fresh = [(1.0, advantage, weight) for part in batches for _, advantage, weight in part]
    for scope, count, tokens in (("micro_batch", 1, exact), ("carried_over", 2, fresh)):
        size = {"max_steps": 1, "gradient_accumulation_steps": count, "search_scope": scope}
        trainer = trained(folder, samples, **size, positive_contribution_target=0.4)
        assert trainer.accelerator.num_processes == 2
        found = oracle.search(tokens, grid, 0.4, "gradient", "upper_first")
        low, high = trainer.clip_bounds.low.item(), trainer.clip_bounds.high.item()
        assert (low, high) == pytest.approx((found.low, found.high))
    end_training(trainer)


if __name__ == "__main__":
    main(*sys.argv[1:])
