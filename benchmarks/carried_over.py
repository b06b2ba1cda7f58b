"""
What `search_scope: carried_over` would choose, beside what `batch` chooses, on the same runs.

    python -m benchmarks.carried_over

The trainer searches in scope `batch`. Beside each choice stands what carried curves would have chosen, scaled to the
advantages of the update and to those of the whole generation. The first update of a generation is left out: there both
know the same.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence

import torch
from transformers import PrinterCallback

from bapo_trl import BAPOConfig, BAPOTrainer
from bapo_trl.clip_bounds import ClipBounds, Contributions
from bapo_trl.clip_bounds.carried_curves import CarriedCurves
from bapo_trl.tasks import load_task, warm_start_path
from bapo_trl.upstream.cpu_speed import keep_freed_memory
from benchmarks.common import Section, provenance, save_result, table
from benchmarks.training_run import SETTINGS


GENERATIONS, UPDATES, SEEDS = 4, 16, (0, 1)
SAMPLES = (128, 16)  # of an update
TARGET, SMALLEST_WEIGHT = 0.7, 0.05
MASSES = ("update", "generation")  # that the forecast goes by; the trainer takes those of the update


class Shadowed(BAPOTrainer):
    """A trainer that also notes what carried curves would choose. It trains as its parent does."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.rows: list[dict] = []
        self._carried = CarriedCurves(self._search.grid, self.accelerator.device)

    def _use(self, bounds: ClipBounds):
        super()._use(bounds)
        is_first = self._buffer_of_masses is not self._buffered_inputs
        if is_first:
            self._take_masses()
        of_update = self._masses_of_buffer[self._window[0]]
        of_generation = Contributions(
            sum(masses.positive for masses in self._masses_of_buffer),
            sum(masses.negative for masses in self._masses_of_buffer),
        )
        curves = self._curves_of_update
        if not is_first:
            for name, masses in zip(MASSES, (of_update, of_generation), strict=True):
                carried = self._search._search(self._carried.scaled_to(masses))
                judged = self._search.judge(carried, curves)
                self.rows.append(
                    {
                        "masses": name,
                        "low": (carried.low - bounds.low).item(),
                        "high": (carried.high - bounds.high).item(),
                        "weight": (carried.negative_weight - bounds.negative_weight).item(),
                        "share": judged.positive_share.item(),
                        "weight_carried": carried.negative_weight.item(),
                        "weight_batch": bounds.negative_weight.item(),
                    }
                )
        self._carried.learn(curves, of_update)

    def _reset_run_state(self):
        super()._reset_run_state()
        take_curves = self._search._take_curves

        def noting() -> Contributions:
            self._curves_of_update = take_curves()
            return self._curves_of_update

        self._search._take_curves = noting


def measure(samples: int, seed: int) -> list[dict]:
    """Return a row for each update and kind of masses."""
    task = load_task()
    with tempfile.TemporaryDirectory() as folder:
        args = BAPOConfig(
            folder,
            seed=seed,
            per_device_train_batch_size=samples,
            steps_per_generation=UPDATES,
            num_generations=8,
            max_steps=GENERATIONS * UPDATES,
            max_completion_length=task.max_new_tokens,
            learning_rate=5e-4,
            positive_contribution_target=TARGET,
            negative_weight_min=SMALLEST_WEIGHT,
            **SETTINGS,
        )
        trainer = Shadowed(str(warm_start_path(task=task)), task.reward_func, args, train_dataset=task.train_dataset)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return trainer.rows


def main():
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    results = []
    for samples in SAMPLES:
        rows = [row for seed in SEEDS for row in measure(samples, seed)]
        results += [
            {"samples": samples, **summarize(name, [row for row in rows if row["masses"] == name])} for name in MASSES
        ]
        print(*results[-2:], sep="\n", flush=True)
    settings = {"threads": 1, "updates": UPDATES, "generations": GENERATIONS, "seeds": len(SEEDS), "target": TARGET}
    save_result("carried_over", "cpu", settings, results)


def summarize(name: str, rows: Sequence[dict]) -> dict:
    """Return percentiles of the differences of one kind of masses, carried over minus batch."""
    weights = [row["weight_carried"] for row in rows], [row["weight_batch"] for row in rows]
    return {
        "masses": name,
        "updates": len(rows),
        **{key: percentiles([row[key] for row in rows]) for key in ("low", "high", "weight", "share")},
        "equal_bounds": round(statistics.mean(row["low"] == row["high"] == 0 for row in rows), 4),
        "weight_deviation": [round(statistics.stdev(values), 4) for values in weights],
    }


def percentiles(values: Sequence[float]) -> list[float]:
    """Return the 5th, 50th and 95th percentile; a share that is undefined is left out."""
    ordered = sorted(value for value in values if value == value)
    return [round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4) for share in (0.05, 0.5, 0.95)]


def render(content: dict) -> Section:
    """Return the section of a result."""
    settings, rows = content["settings"], content["results"]
    cells = [
        [
            str(row["samples"]),
            row["masses"],
            *(" / ".join(f"{value:+.2f}" for value in row[key]) for key in ("low", "high", "weight")),
            " / ".join(f"{value:.2f}" for value in row["share"]),
            "{:.2f} ({:.2f})".format(*row["weight_deviation"]),
        ]
        for row in rows
    ]
    text = [
        "## Curves carried over",
        "What `search_scope: carried_over` would have chosen, minus what `batch` chose, on the same runs: 5th, 50th "
        "and 95th percentile over the updates. Then the share that the actual curves have under the carried choice "
        f"(the target is {settings['target']}), and the standard deviation of the weight, in parentheses that of "
        f"`batch`. Sums of the demo, {settings['updates']} updates a generation, {settings['generations']} "
        f"generations, {settings['seeds']} seeds. The first update of a generation is left out: both know the same.",
        table(
            [
                "Samples an update",
                "Masses of the",
                "Lower bound",
                "Upper bound",
                "Weight",
                "Share",
                "Deviation",
            ],
            cells,
        ),
        "Its time is in the [table of updates](#time-of-an-update-cpu).",
        provenance(content),
    ]
    return Section("\n\n".join(text))


if __name__ == "__main__":
    main()
