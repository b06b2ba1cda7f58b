"""
Measure the time of optimizer updates of `BAPOTrainer` relative to `GRPOTrainer`, on the same stale samples.

    python -m benchmarks.update_cost

Both trainers run `train()` in the same process and alternate after each update; the first one changes from round to
round. The time of an update is the time between two `on_step_begin` events: micro-batches, gradient clipping,
optimizer step and logging.

Both trainers generate in the same way, so generation is left out: one batch of random tokens is reused for the whole
run. The batch is fresh only in the first update, which is a warm-up round and not counted.

The time of an update varies by a few percent with the location of its tensors in memory. Some of the differences to
measure are smaller. Therefore:

- Both trainers train the same model.
- Freed memory stays with the process (`keep_freed_memory`).
- Everything is run twice, once with each trainer created first; the ratio of a round is the geometric mean of the two
  runs' ratios BAPO / GRPO, and a result is the median over the rounds.
- The row `control` compares `GRPOTrainer` with itself: its difference from 1 is noise.

The model is a randomly initialised Qwen2. `gpu_first_run` times updates on a GPU.
"""

import argparse
import math
import statistics
import tempfile
from dataclasses import asdict, dataclass

import torch

from benchmarks import layout_cost
from benchmarks.common import in_turns, keep_freed_memory, save_result, spread, time_s
from benchmarks.gpu_first_run.shapes import Load, Shape, make_model
from benchmarks.gpu_first_run.trainers import Setup, make_trainer
from benchmarks.gpu_first_run.updates import RandomCompletions, load_settings
from benchmarks.watched_training import SteppedTraining


SHAPE = Shape(256, 1024, 4, 4, 2, 1024, ties_embeddings=False)
ROWS, COMPLETION_TOKENS = 4, 224  # of a micro-batch
WARMUP_ROUNDS = 3


@dataclass(frozen=True)
class Setting:
    """A row of the results; `scope` is "grpo" for the control, with `GRPOTrainer` instead of `BAPOTrainer`."""

    name: str
    scope: str
    micro_batches: int
    gradient_checkpointing: bool
    target: float | None


SETTINGS = (
    Setting("control", "grpo", 4, False, None),
    Setting("micro_batch", "micro_batch", 4, False, 1.02),
    Setting("carried_over", "carried_over", 4, False, 1.02),
    Setting("batch", "batch", 4, False, 1.40),
    Setting("batch_checkpointing", "batch", 4, True, 1.30),
    Setting("batch_of_one", "batch", 1, False, 1.02),
)


def measure_setting(setting: Setting, rounds: int) -> dict:
    """Return a row of the results."""
    halves = [_measure_pair(setting, rounds, order) for order in (("grpo", "bapo"), ("bapo", "grpo"))]
    ratios = [[bapo / grpo for grpo, bapo in zip(half["grpo"], half["bapo"], strict=True)] for half in halves]
    return {
        **asdict(setting),
        "ratio": spread([math.sqrt(first * second) for first, second in zip(*ratios, strict=True)]),
        "grpo_update_s": round(statistics.median(halves[0]["grpo"] + halves[1]["grpo"]), 3),
    }


def _measure_pair(setting: Setting, rounds: int, order: tuple[str, str]) -> dict[str, list[float]]:
    """Return the seconds of each counted update by trainer; the trainers are created and started in `order`."""
    setup, load = Setup("cpu", "tiny", 0), Load("", SHAPE, False, ROWS, COMPLETION_TOKENS, rounds)
    settings = load_settings(setup, load, WARMUP_ROUNDS + rounds) | {
        "gradient_accumulation_steps": setting.micro_batches,
        "steps_per_generation": setting.micro_batches,
        "gradient_checkpointing": setting.gradient_checkpointing,
    }
    with_weight = {"negative_weight_min": 0.05} if setting.scope == "carried_over" else {}  # all that it is for
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(SHAPE, "cpu", torch.float32, 0)
        runs = {}
        for name in order:
            # TRL's micro-batches: what they cost otherwise is measured by `layout_cost`
            own = {} if "grpo" in (name, setting.scope) else {**with_weight, "micro_batch_layout": "padded"}
            kind = "grpo" if name == "grpo" else setting.scope
            trainer = make_trainer(
                kind, model, f"{folder}/{name}", settings | own, rollout_func=RandomCompletions(load, 0)
            )
            runs[name] = SteppedTraining(trainer)
        for run in runs.values():
            run.start()
        seconds: dict[str, list[float]] = {name: [] for name in order}
        for index, name in in_turns(order, WARMUP_ROUNDS + rounds):
            forwards_before = runs[name].forwards
            seconds[name].append(time_s(runs[name].update))
            if index > 0:
                _check_forwards(name, runs[name].forwards - forwards_before, setting)
        for run in runs.values():
            run.finish()
    return {name: values[WARMUP_ROUNDS:] for name, values in seconds.items()}


def _check_forwards(name: str, forwards: int, setting: Setting) -> None:
    # The figure would be void if the samples were fresh and the search could do without its forward passes.
    looks_ahead = name == "bapo" and setting.scope == "batch" and setting.micro_batches > 1
    expected = setting.micro_batches * (2 if looks_ahead else 1)
    if forwards != expected:
        raise RuntimeError(f"{setting.name}: {forwards} forward passes in an update of {name}, expected {expected}.")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="rounds of each setting")
    args = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    results = []
    for setting in SETTINGS:
        results.append(measure_setting(setting, args.rounds))
        print(results[-1], flush=True)
    sizes = {"threads": 1, **asdict(SHAPE), "rows": ROWS, "completion_tokens": COMPLETION_TOKENS}
    save_result("update_cost", sizes, results)
    layout_cost.run()


if __name__ == "__main__":
    main()
