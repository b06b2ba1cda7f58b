"""Trains with overlapped generation on ranks whose completions differ in length, beside the oracle of the tests."""

import sys
from pathlib import Path

from bapo_trl.upstream.fixes import end_training
from tests.helpers.alike import assert_same_weights
from tests.helpers.toy import ending_model
from tests.vllm_server.test_overlap import OneGenerationLate, log_of, run


def main(out: str) -> None:
    folder = Path(out)
    size = {"save_strategy": "steps", "save_steps": 2, "max_completion_length": 30}
    trainer = run(folder / "overlap", model=ending_model(), **size)
    assert trainer.accelerator.num_processes == 2
    oracle = run(folder / "oracle", OneGenerationLate, model=ending_model(), overlap_generation=False, **size)
    assert_same_weights(trainer, oracle)
    assert log_of(trainer) == log_of(oracle)
    assert log_of(trainer)[0]["completions/min_length"] < 10 < log_of(trainer)[0]["completions/max_length"]
    checkpoint = str(folder / "overlap" / "checkpoint-4")
    resumed = run(folder / "resumed", model=ending_model(), resume=checkpoint, **size)
    assert_same_weights(resumed, trainer)
    end_training(trainer)


if __name__ == "__main__":
    main(*sys.argv[1:])
