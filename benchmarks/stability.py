"""
Stability under staleness: BAPO against what users would pick instead, by the updates between two generations.

    python benchmarks/stability.py --preset quick          # minutes: does it run; written to outputs/
    python benchmarks/stability.py --preset full --jobs 2  # the study of docs/results.md, about 8 hours
    python benchmarks/stability.py --preset gpu            # the same on a GPU, with four times the updates

Each run is a process of its own on one thread. All arms share task, warm start, order of the problems, generated
tokens and updates; each has its learning rate chosen from one grid, on seeds that are not reported. An interrupted
study goes on where it stopped.
"""

import argparse
import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from training_run import TASK_SETTINGS, run_all

from measuring import save_result


ROWS = {task: settings["per_device_train_batch_size"] for task, settings in TASK_SETTINGS.items()}


def fixed(low: float, high: float) -> dict:
    """Return the settings of a fixed clip range."""
    return {"ratio_lower_start": low, "ratio_lower_max": low, "ratio_upper_start": high, "ratio_upper_max": high}


# Settings of each arm. Those of TRL's other losses are the ones that TRL's documentation gives for their papers.
ARMS = {
    "GRPO": fixed(0.8, 1.2),
    "clip-higher": fixed(0.8, 1.28),
    "BAPO": {},
    "BAPO, target 0.4": {"positive_contribution_target": 0.4},
    "BAPO, surrogate": {"contribution_measure": "surrogate"},
    "released recipe": {  # the bounds of recipes/released_recipe.yaml
        "positive_contribution_target": 0.33333333,
        "ratio_lower_start": 0.8,
        "ratio_lower_max": 0.95,
        "ratio_lower_step": 0.05,
        "ratio_upper_start": 1.2,
        "ratio_upper_max": 2.0,
        "ratio_upper_step": 0.1,
        "contribution_measure": "surrogate",
        "search_order": "lower_first",
        "search_scope": "micro_batch",
        "delta": 3.0,
    },
    "GSPO": {**fixed(1 - 3e-4, 1 + 4e-4), "importance_sampling_level": "sequence", "loss_type": "grpo"},
    "CISPO": {"loss_type": "cispo", "epsilon_high": 5.0},
    "SAPO": {"loss_type": "sapo"},
    "VESPO": {"loss_type": "vespo"},
}
LOSSES_WITHOUT_BOUNDS = ("cispo", "sapo", "vespo")  # trained by TRL's own GRPOTrainer
MAIN = ("GRPO", "clip-higher", "BAPO")
# What the search consists of, one part changed at a time; learning rate of BAPO
ABLATION = {
    "target 0.6": {"positive_contribution_target": 0.6},
    "lower bound first": {"search_order": "lower_first"},
    "coarse grid": {"ratio_lower_step": 0.1, "ratio_upper_step": 0.3},
    "fixed at start": fixed(0.6, 1.2),
    "fixed at end": fixed(0.9, 3.0),
    "4 micro-batches, batch scope": {"gradient_accumulation_steps": 4},
    "4 micro-batches, micro-batch scope": {"gradient_accumulation_steps": 4, "search_scope": "micro_batch"},
}


@dataclass(frozen=True)
class Cell:
    """
    What makes the samples of a run stale.

    Attributes:
        updates_per_generation (`int`):
            Optimizer updates between two generations.
        num_iterations (`int`):
            Passes over a generation that these updates make.
        is_replayed (`bool`):
            Whether half of each batch comes from the replay queue, and is at least 16 updates old.
    """

    updates_per_generation: int
    num_iterations: int = 1
    is_replayed: bool = False

    def settings(self, micro_batches: int) -> dict:
        """Return what sets the staleness of a run whose updates have so many micro-batches."""
        queue = {"replay_fraction": 0.5, "replay_min_staleness": 16, "replay_capacity": 16384}
        return {
            "steps_per_generation": self.updates_per_generation // self.num_iterations * micro_batches,
            "num_iterations": self.num_iterations,
            **(queue if self.is_replayed else {}),
        }

    @property
    def name(self) -> str:
        """Name in tables."""
        passes = f", {self.num_iterations} passes" if self.num_iterations > 1 else ""
        return f"{self.updates_per_generation}{passes}{', queue' if self.is_replayed else ''}"


FRESH = [Cell(4), Cell(1)]
STALE = [Cell(16), Cell(64)]
OTHERS = [Cell(4, num_iterations=4), Cell(16, num_iterations=4), Cell(64, num_iterations=4), Cell(4, is_replayed=True)]


@dataclass(frozen=True)
class Run:
    """A run of the study, by what it is compared on."""

    task: str
    arm: str
    cell: Cell
    learning_rate: float
    seed: int


@dataclass(frozen=True)
class Preset:
    """
    Size of a study.

    Attributes:
        updates (`dict[str, int]`):
            Tasks, with the updates of their runs. With 64 updates per generation, there are twice as many.
        learning_rates (`dict[str, tuple[float, ...]]`):
            Grid of each task.
        seeds (`tuple[int, ...]`):
            Seeds of the main arms.
        few_seeds (`tuple[int, ...]`):
            Seeds of the other arms and of the ablation.
        pilot_seeds (`tuple[int, ...]`):
            Seeds on which learning rates are chosen.
        args (`dict`):
            Further settings of every run.
    """

    updates: dict[str, int]
    learning_rates: dict[str, tuple[float, ...]]
    seeds: tuple[int, ...]
    few_seeds: tuple[int, ...]
    pilot_seeds: tuple[int, ...]
    args: dict = field(default_factory=dict)

    def spec(self, run: Run, measurements: int) -> dict:
        """Return what [`training_run.run`] takes, with so many measurements in `updates`."""
        settings = {**ARMS, **ABLATION}[run.arm]
        updates = self.updates[run.task] * (2 if run.cell.updates_per_generation == 64 else 1)
        args = {**settings, **run.cell.settings(1), **self.args, "learning_rate": run.learning_rate}
        micro_batches = settings.get("gradient_accumulation_steps", 1)
        if micro_batches > 1:
            args |= run.cell.settings(micro_batches)
            args["per_device_train_batch_size"] = ROWS[run.task] // micro_batches
        return {
            "task": run.task,
            "trainer": "GRPO" if settings.get("loss_type") in LOSSES_WITHOUT_BOUNDS else "BAPO",
            "seed": run.seed,
            "generations": updates // run.cell.updates_per_generation,
            "held_out_every": self.updates[run.task] // measurements,
            "args": args,
        }


FULL = Preset(
    updates={"running_totals": 64, "sums": 128},
    learning_rates={"running_totals": (1e-4, 2e-4, 4e-4), "sums": (2.5e-4, 5e-4, 1e-3)},
    seeds=(0, 1, 2, 3, 4),
    few_seeds=(0, 1, 2),
    pilot_seeds=(1000,),
)
PRESETS = {
    "quick": Preset({"sums": 64}, {"sums": (5e-4,)}, seeds=(0, 1), few_seeds=(0,), pilot_seeds=(1000,)),
    "full": FULL,
    "gpu": replace(
        FULL, updates={"running_totals": 256, "sums": 512}, args={"use_cpu": False, "dataloader_pin_memory": True}
    ),
}


def pilots(preset: Preset, task: str, arms: Iterable[str]) -> Iterator[Run]:
    """Yield the runs that choose the learning rates."""
    for cell, seed, rate, arm in itertools.product(STALE, preset.pilot_seeds, preset.learning_rates[task], arms):
        yield Run(task, arm, cell, rate, seed)


def choose_learning_rates(runs: Iterable[Run], results: Iterable[dict]) -> dict[tuple[str, int], float]:
    """Return the learning rate of each arm and staleness: the best accuracy at the end, over the pilot seeds."""
    scores: dict[tuple[str, int], dict[float, list[float]]] = {}
    for run, result in zip(runs, results, strict=True):
        by_rate = scores.setdefault((run.arm, run.cell.updates_per_generation), {})
        by_rate.setdefault(run.learning_rate, []).extend(point["sampled"] for point in result["held_out"][-2:])
    means = {key: {rate: statistics.mean(values) for rate, values in scores[key].items()} for key in scores}
    for key, by_rate in means.items():
        print(f"  {key}: " + ", ".join(f"{rate:g}: {mean:.3f}" for rate, mean in by_rate.items()), flush=True)
    return {key: max(by_rate, key=by_rate.get) for key, by_rate in means.items()}


def reported(preset: Preset, task: str, rates: dict[tuple[str, int], float]) -> Iterator[Run]:
    """Yield the runs that are reported, the most telling first."""

    def runs(arms: Iterable[str], cells: Iterable[Cell], seeds: Iterable[int]) -> Iterator[Run]:
        for cell, seed, arm in itertools.product(cells, seeds, arms):
            staleness = 64 if cell.updates_per_generation == 64 else 16
            yield Run(task, arm, cell, rates["BAPO" if arm in ABLATION else arm, staleness], seed)

    yield from runs(MAIN, [*STALE, *FRESH], preset.seeds)
    yield from runs([arm for arm in ARMS if arm not in MAIN], STALE, preset.few_seeds)
    yield from runs(ABLATION, STALE, preset.few_seeds)
    yield from runs(MAIN, OTHERS, preset.seeds)


def condense(run: Run, result: dict) -> dict:
    """Return the row of a run: its figures, its held-out measurements and its metrics as means over 16 stretches."""
    series, points = result["series"], result["held_out"]
    accuracies = [point["sampled"] for point in points]
    norms = [norm for norm in series["grad_norm"] if norm is not None]
    updates = [point["update"] for point in points]
    area = sum(
        (right - left) * (low + high) / 2
        for (left, low), (right, high) in itertools.pairwise(zip(updates, accuracies, strict=True))
    )
    return {
        "task": run.task,
        "arm": run.arm,
        "cell": run.cell.name,
        "learning_rate": run.learning_rate,
        "seed": run.seed,
        "final": accuracies[-1],
        "greedy": points[-1]["greedy"],
        "area": round(area / updates[-1], 4),
        "entropy_ratio": round(points[-1]["entropy"] / points[0]["entropy"], 4),
        "gradient_peak": round(max(norms) / statistics.median(norms), 2),
        "is_collapsed": accuracies[-1] < max(accuracies) / 2,
        "updates": result["updates"],
        "generated_tokens": result["generated_tokens"][-1],
        "tokens_per_update": round(result["generated_tokens"][-1] * run.cell.num_iterations / result["updates"]),
        "seconds": result["seconds"],
        "means": result["means"],
        "held_out": [[point[key] for key in ("update", "sampled", "greedy", "entropy")] for point in points],
        "stretches": {name: stretches(values) for name, values in series.items()},
    }


def stretches(values: Sequence[float | None], count: int = 16) -> list[float | None]:
    """Return the means of the defined values in `count` stretches of equal length."""
    length = -(-len(values) // count)
    parts = [[v for v in values[i : i + length] if v is not None] for i in range(0, len(values), length)]
    return [round(statistics.mean(part), 4) if part else None for part in parts]


# Factors of the standard error for 95 % intervals, by the number of seeds (Student's t)
INTERVAL_FACTORS = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


def mean_and_interval(values: Sequence[float]) -> dict[str, float | None]:
    """Return the mean and half the width of its 95 % interval, which a single value does not have."""
    half = None
    if len(values) > 1:
        half = round(INTERVAL_FACTORS[len(values)] * statistics.stdev(values) / len(values) ** 0.5, 4)
    return {"mean": round(statistics.mean(values), 4), "half_width": half}


def summarize(rows: Sequence[dict]) -> list[dict]:
    """Return a row for each task, staleness and arm: means over the seeds, with intervals."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["cell"], row["arm"]), []).append(row)
    return [
        {
            "task": task,
            "cell": cell,
            "arm": arm,
            "learning_rate": group[0]["learning_rate"],
            "seeds": len(group),
            **{
                key: mean_and_interval([row[key] for row in group])
                for key in ("final", "greedy", "area", "entropy_ratio", "gradient_peak")
            },
            "collapsed": statistics.mean(row["is_collapsed"] for row in group),
            "tokens_per_update": round(statistics.mean(row["tokens_per_update"] for row in group)),
            "generated_tokens": round(statistics.mean(row["generated_tokens"] for row in group)),
            "seconds_per_update": round(statistics.mean(row["seconds"] / row["updates"] for row in group), 3),
            "means": {
                name: round(statistics.mean(row["means"][name] for row in group), 4) for name in group[0]["means"]
            },
        }
        for (task, cell, arm), group in groups.items()
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="full", help="size of the study")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--finished", type=Path, default=Path("outputs/stability.jsonl"), help="finished runs")
    parser.add_argument("--tasks", nargs="+", help="these tasks only")
    parser.add_argument("--arms", nargs="+", help="these arms only")
    arguments = parser.parse_args()
    preset = PRESETS[arguments.preset]

    rows, chosen = [], {}
    for task in arguments.tasks or preset.updates:
        arms = [arm for arm in ARMS if arguments.arms is None or arm in arguments.arms]

        def make(runs: list[Run], measurements: int) -> list[dict]:
            specs = [preset.spec(run, measurements) for run in runs]
            return [run["result"] for run in run_all(specs, arguments.finished, arguments.jobs)]

        pilot_runs = list(pilots(preset, task, arms))
        rates = choose_learning_rates(pilot_runs, make(pilot_runs, measurements=4))
        chosen[task] = {f"{arm}, {staleness}": rate for (arm, staleness), rate in rates.items()}
        runs = [run for run in reported(preset, task, rates) if arguments.arms is None or run.arm in arguments.arms]
        rows += [condense(run, result) for run, result in zip(runs, make(runs, measurements=8), strict=True)]

    device = "cpu" if preset.args.get("use_cpu", True) else "cuda"
    settings = {**asdict(preset), "chosen_learning_rates": chosen, "threads": 1, "summary": summarize(rows)}
    save_result("stability", device, settings, rows)


if __name__ == "__main__":
    main()
