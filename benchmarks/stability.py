"""
Stability under staleness: BAPO against what users would pick instead, by the updates between two generations.

    python benchmarks/stability.py --preset quick          # minutes: does it run; written to outputs/
    python benchmarks/stability.py --preset full --jobs 2  # the study of docs/results.md, about 5 hours
    python benchmarks/stability.py --preset gpu            # the same on a GPU, with four times the updates

Each run is a process of its own on one thread. All arms share task, warm start, order of the problems, the number of
generated answers and of updates; each has its learning rate chosen from one grid, on seeds that are not reported. An
interrupted study goes on where it stopped; after a change to what a run does, begin with another `--finished` file.
The runs of the committed results, with the metrics of each update, are in `results/stability_runs.jsonl.gz`; to go on
from them:

    mkdir -p outputs
    gunzip --stdout benchmarks/results/stability_runs.jsonl.gz > outputs/stability_full.jsonl

The presets full and gpu write `benchmarks/results/stability*.json`, quick does not.
"""

import argparse
import itertools
import json
import math
import operator
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import torch
from training_run import TASK_SETTINGS, fixed_clip, run_all

from bapo_trl import BAPOConfig
from measuring import ROOT, save_result


ROWS = {task: settings["per_device_train_batch_size"] for task, settings in TASK_SETTINGS.items()}


# Settings of each arm. Those of TRL's other losses are the ones that TRL's documentation gives for their papers.
ARMS = {
    "GRPO": fixed_clip(0.8, 1.2),
    "clip-higher": fixed_clip(0.8, 1.28),
    "BAPO": {},
    "BAPO, target 0.4": {"positive_contribution_target": 0.4},
    "BAPO, surrogate": {"contribution_measure": "surrogate"},
    "BAPO, sequence level": {"importance_sampling_level": "sequence"},
    "released recipe's bounds": {  # those of recipes/released_recipe.yaml
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
    "GSPO": {**fixed_clip(1 - 3e-4, 1 + 4e-4), "importance_sampling_level": "sequence", "loss_type": "grpo"},
    "CISPO": {"loss_type": "cispo", "epsilon_high": 5.0},
    "SAPO": {"loss_type": "sapo"},
    "VESPO": {"loss_type": "vespo"},
}
MAIN = ("GRPO", "clip-higher", "BAPO")
# One thing changed at a time, at BAPO's learning rate
ABLATION = {
    "target 0.6": {"positive_contribution_target": 0.6},
    "upper bound alone": {"ratio_lower_max": 0.6},
    "lower bound alone": {"ratio_upper_start": 3.0},
    "lower bound first": {"search_order": "lower_first"},
    "coarse grid": {"ratio_lower_step": 0.1, "ratio_upper_step": 0.3},
    "fixed at start": fixed_clip(0.6, 1.2),
    "fixed at end": fixed_clip(0.9, 3.0),
    "fixed at the widest": fixed_clip(0.6, 3.0),
    "smoothed bounds": {},
    "delta 3": {"delta": 3.0},
    "upper bound alone, delta 3": {"ratio_lower_max": 0.6, "delta": 3.0},
    "GRPO's bounds, delta 3": {**fixed_clip(0.8, 1.2), "delta": 3.0},
    "fixed at the widest, delta 3": {**fixed_clip(0.6, 3.0), "delta": 3.0},
    "4 micro-batches, batch scope": {"gradient_accumulation_steps": 4},
    "4 micro-batches, micro-batch scope": {"gradient_accumulation_steps": 4, "search_scope": "micro_batch"},
}

# Variants that the ablation speaks for: compared with BAPO on seeds that had no part in their choice
CANDIDATES = ("upper bound alone", "delta 3")
# The part of the ablation that the easy task has as well
ON_BOTH_TASKS = (
    *CANDIDATES,
    "fixed at the widest",
    "upper bound alone, delta 3",
    "GRPO's bounds, delta 3",
    "fixed at the widest, delta 3",
)

# Trainers (`training_run.TRAINERS`) of the arms that do not run in `BAPOTrainer`
TRAINERS = {"CISPO": "GRPO", "SAPO": "GRPO", "VESPO": "GRPO", "smoothed bounds": "smoothed BAPO"}


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
            Whether half of each batch comes from the replay queue, where it holds samples that are at least 16
            updates old: at first it holds none.
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
        ablation (`dict[str, tuple[str, ...]]`):
            Arms of the ablation that each task has.
        few_seeds (`tuple[int, ...]`):
            Seeds of the other arms and of the ablation.
        candidate_seeds (`tuple[int, ...]`):
            Seeds on which candidates for the default are compared with BAPO.
        pilot_seeds (`tuple[int, ...]`):
            Seeds on which learning rates are chosen.
        args (`dict`):
            Further settings of every run.
    """

    updates: dict[str, int]
    learning_rates: dict[str, tuple[float, ...]]
    ablation: dict[str, tuple[str, ...]]
    seeds: tuple[int, ...]
    few_seeds: tuple[int, ...]
    candidate_seeds: tuple[int, ...]
    pilot_seeds: tuple[int, ...]
    args: dict = field(default_factory=dict)

    def spec(self, run: Run, measurements: int) -> dict:
        """Return what [`training_run.run`] takes, with so many measurements in `updates`."""
        settings = {**ARMS, **ABLATION}[run.arm]
        updates = self.updates[run.task] * (2 if run.cell.updates_per_generation == 64 else 1)
        micro_batches = settings.get("gradient_accumulation_steps", 1)
        args = {**settings, **run.cell.settings(micro_batches), **self.args, "learning_rate": run.learning_rate}
        if micro_batches > 1:
            args["per_device_train_batch_size"] = ROWS[run.task] // micro_batches
        return {
            "task": run.task,
            "trainer": TRAINERS.get(run.arm, "BAPO"),
            "seed": run.seed,
            "generations": updates // run.cell.updates_per_generation,
            "held_out_every": self.updates[run.task] // measurements,
            "args": args,
        }


FULL = Preset(
    updates={"running_totals": 64, "sums": 128},
    learning_rates={"running_totals": (1e-4, 2e-4, 4e-4), "sums": (2.5e-4, 5e-4, 1e-3)},
    ablation={"running_totals": tuple(ABLATION), "sums": ON_BOTH_TASKS},
    seeds=(0, 1, 2, 3, 4),
    few_seeds=(0, 1, 2),
    candidate_seeds=(5, 6, 7, 8, 9),
    pilot_seeds=(1000,),
)
PRESETS = {
    "quick": Preset(
        updates={"sums": 64},
        learning_rates={"sums": (5e-4,)},
        ablation={"sums": ()},
        seeds=(0,),
        few_seeds=(),
        candidate_seeds=(),
        pilot_seeds=(),
    ),
    "full": FULL,
    "gpu": replace(
        FULL,
        updates={"running_totals": 256, "sums": 512},
        args={"use_cpu": False, "dataloader_pin_memory": True, "cache_implementation": None},
    ),
}


def try_learning_rates(
    task: str, arms: Sequence[str], preset: Preset, make: Callable[[list[Run], int], list[tuple[Run, dict]]]
) -> dict[tuple[str, int], dict[float, float]]:
    """
    Return the accuracies of each arm by learning rate, at staleness 16 and 64.

    They are means of the last two of four measurements, over the pilot seeds.

    Where the best lies at an end of the grid, the grid goes on beyond it, up to twice. A grid of one learning rate is
    not tried, its accuracy is given as 1.
    """
    grids = {(arm, cell): preset.learning_rates[task] for cell in STALE for arm in arms}
    if len(preset.learning_rates[task]) == 1:
        (rate,) = preset.learning_rates[task]
        return {(arm, cell.updates_per_generation): {rate: 1.0} for arm, cell in grids}
    for extension in range(3):
        runs = [
            Run(task, arm, cell, rate, seed)
            for (arm, cell), grid in grids.items()
            for rate in grid
            for seed in preset.pilot_seeds
        ]
        ends: dict[tuple, dict[float, list[float]]] = {}
        for run, result in make(runs, 4):
            by_rate = ends.setdefault((run.arm, run.cell), {})
            by_rate.setdefault(run.learning_rate, []).extend(accuracies_of(result)[-2:])
        means = {
            key: {rate: statistics.mean(by_rate[rate]) for rate in sorted(by_rate)} for key, by_rate in ends.items()
        }
        for (arm, cell), by_rate in means.items():
            described = ", ".join(f"{rate:g}: {accuracy:.3f}" for rate, accuracy in by_rate.items())
            print(f"  {arm}, {cell.name}: {described}", flush=True)
        beyond = {
            key: {min(by_rate): 0.5, max(by_rate): 2.0}.get(best_rate(by_rate)) for key, by_rate in means.items()
        }
        if extension == 2 or not any(beyond.values()):
            break
        grids |= {key: (*grids[key], best_rate(means[key]) * factor) for key, factor in beyond.items() if factor}
    return {(arm, cell.updates_per_generation): by_rate for (arm, cell), by_rate in means.items()}


def best_rate(accuracies: dict[float, float]) -> float:
    """Return the learning rate with the best accuracy, of equal ones the lowest."""
    return max(sorted(accuracies), key=accuracies.__getitem__)


def accuracies_of(result: dict) -> list[float]:
    """Return the held-out accuracies of a run; of one that broke off they are 0 from there on."""
    return [point["sampled"] for point in result["held_out"]]


@dataclass(frozen=True)
class Plan:
    """
    The runs of a task whose arms have a learning rate.

    Attributes:
        preset (`Preset`):
            Size of the study.
        task (`str`):
            Name of the task.
        rates (`dict[tuple[str, int], float]`):
            Learning rate by arm and updates per generation, 16 or 64.
    """

    preset: Preset
    task: str
    rates: dict[tuple[str, int], float]

    def reported(self) -> Iterator[Run]:
        """Yield the runs of the tables, the most telling first."""
        preset = self.preset
        yield from self._runs(MAIN, [*STALE, Cell(4)], preset.seeds)
        yield from self._runs(["GRPO"], [Cell(1)], preset.seeds)  # on-policy, where no bound has any effect
        yield from self._runs([arm for arm in ARMS if arm not in MAIN], STALE, preset.few_seeds)
        yield from self._runs(preset.ablation[self.task], STALE, preset.few_seeds)
        yield from self._runs(MAIN, OTHERS, preset.seeds)

    def candidates(self) -> Iterator[Run]:
        """Yield the runs that compare the candidates for the default with BAPO."""
        yield from self._runs(["BAPO", *CANDIDATES], STALE, self.preset.candidate_seeds)

    def _runs(self, arms: Iterable[str], cells: Iterable[Cell], seeds: Iterable[int]) -> Iterator[Run]:
        for cell, seed, arm in itertools.product(cells, seeds, arms):
            key = ("BAPO" if arm in ABLATION else arm, 64 if cell.updates_per_generation == 64 else 16)
            if key in self.rates:
                yield Run(self.task, arm, cell, self.rates[key], seed)


def more_seeds(preset: Preset, made: Iterable[tuple[Run, dict]]) -> Iterator[Run]:
    """Yield runs with the other seeds of the arms that end within reach (0.02) of the best of their cell."""
    finals: dict[Cell, dict[str, list[float]]] = {}
    first_runs = {}
    for run, result in made:
        if run.arm in ARMS and run.cell in STALE:
            finals.setdefault(run.cell, {}).setdefault(run.arm, []).append(accuracies_of(result)[-1])
            first_runs.setdefault((run.cell, run.arm), run)
    for cell, arms in finals.items():
        means = {arm: statistics.mean(ends) for arm, ends in arms.items()}
        for arm in means:
            if arm not in MAIN and means[arm] >= max(means.values()) - 0.02:
                yield from (
                    replace(first_runs[cell, arm], seed=seed) for seed in preset.seeds[len(preset.few_seeds) :]
                )


def condense(run: Run, result: dict) -> dict:
    """Return the row of a run: its figures, its held-out measurements and its metrics as means over 16 stretches."""
    series, points = result["series"], result["held_out"]
    accuracies = accuracies_of(result)
    norms = [norm for norm in series["grad_norm"] if norm]
    area = sum(
        (right["update"] - left["update"]) * (left["sampled"] + right["sampled"]) / 2
        for left, right in itertools.pairwise(points)
    )
    return {
        "task": run.task,
        "arm": run.arm,
        "cell": run.cell.name,
        "learning_rate": run.learning_rate,
        "seed": run.seed,
        "final": accuracies[-1],
        "greedy": points[-1]["greedy"],
        "area": round(area / points[-1]["update"], 4),
        "entropy_ratio": None if "failure" in result else round(points[-1]["entropy"] / points[0]["entropy"], 4),
        "gradient_peak": round(max(norms) / statistics.median(norms), 2) if norms else None,
        "undefined_gradients": series["grad_norm"][: result["updates"]].count(None),
        "largest_fall": round(max(map(operator.sub, itertools.accumulate(accuracies, max), accuracies)), 4),
        "is_collapsed": accuracies[-1] < max(accuracies) / 2,
        **describe_search(run.arm, series),
        "updates": result["updates"],
        "generated_tokens": result["generated_tokens"][-1],
        "tokens_per_update": round(result["generated_tokens"][-1] * run.cell.num_iterations / result["updates"]),
        "seconds": result["seconds"],
        "means": result["means"],
        "held_out": [[point[key] for key in ("update", "sampled", "greedy", "entropy")] for point in points],
        "stretches": {name: stretches(series[name]) for name in DRAWN if name in series},
    }


def describe_search(arm: str, series: dict[str, list]) -> dict:
    """
    Return what the search of an arm did, nothing for arms without one.

    Shares of the updates in which it stayed at the start and went to the end of its path; how much the positive share
    under the start bounds varies over the updates, and by how much the search raised it, at most and on average over
    the updates in which it did; the largest importance ratio in the update with the largest gradient.
    """
    settings = {f.name: f.default for f in fields(BAPOConfig)} | ARMS.get(arm, {}) | ABLATION.get(arm, {})
    ends = {
        name: (settings[f"ratio_lower_{end}"], settings[f"ratio_upper_{end}"])
        for name, end in (("at_start", "start"), ("at_end", "max"))
    }
    if "bapo/clip_low" not in series or ends["at_start"] == ends["at_end"]:
        return {}
    shares = [
        pair
        for pair in zip(series["bapo/positive_share_initial"], series["bapo/positive_share"], strict=True)
        if None not in pair
    ]
    initial = [share for share, _ in shares]
    gains = [share - before for before, share in shares if share > before]
    norms = [norm or 0.0 for norm in series["grad_norm"]]
    chosen = [
        bounds for bounds in zip(series["bapo/clip_low"], series["bapo/clip_high"], strict=True) if None not in bounds
    ]
    return {
        **{
            name: round(statistics.mean(math.dist(bounds, end) < 1e-3 for bounds in chosen), 4)
            for name, end in ends.items()
        },
        "initial_share_deviation": round(statistics.pstdev(initial), 4),
        "initial_share_range": [min(initial), max(initial)],
        "largest_share_gain": round(max(gains, default=0.0), 4),
        "mean_share_gain": round(statistics.mean(gains), 4) if gains else 0.0,
        "ratio_at_gradient_peak": series["ratio/max"][norms.index(max(norms))],
    }


DRAWN = ("grad_norm", "bapo/clip_low", "bapo/clip_high", "bapo/positive_share_initial", "bapo/positive_share")


def stretches(values: Sequence[float | None], count: int = 16) -> list[float | None]:
    """Return the means of the defined values in `count` stretches, as even as can be, fewer if values are fewer."""
    count = min(count, len(values))
    ends = [index * len(values) // count for index in range(count + 1)]
    parts = [[v for v in values[start:end] if v is not None] for start, end in itertools.pairwise(ends)]
    return [round(statistics.mean(part), 4) if part else None for part in parts]


# Factors of the standard error for 95 % intervals, by the number of seeds (Student's t), which may be 10 at most
INTERVAL_FACTORS = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


def mean_and_interval(values: Sequence[float | None]) -> dict[str, float | None]:
    """Return the mean of the defined values and half the width of its 95 % interval; one value has none."""
    defined = [value for value in values if value is not None]
    half = None
    if len(defined) > 1:
        half = round(INTERVAL_FACTORS[len(defined)] * statistics.stdev(defined) / len(defined) ** 0.5, 4)
    return {"mean": round(statistics.mean(defined), 4) if defined else None, "half_width": half}


def summarize(rows: Sequence[dict]) -> list[dict]:
    """
    Return a row for each task, staleness and arm: means over the seeds, with intervals.

    `gains` are how far the runs end above those of BAPO with the same seeds, `gain` is their mean.
    """
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["cell"], row["arm"]), []).append(row)
    bapo = {(row["task"], row["cell"], row["seed"]): row["final"] for row in rows if row["arm"] == "BAPO"}
    gains = {
        (task, cell, arm): [
            round(row["final"] - bapo[task, cell, row["seed"]], 4)
            for row in group
            if (task, cell, row["seed"]) in bapo
        ]
        for (task, cell, arm), group in groups.items()
    }
    return [
        {
            "task": task,
            "cell": cell,
            "arm": arm,
            "learning_rate": group[0]["learning_rate"],
            "seeds": [row["seed"] for row in group],
            "gains": gains[task, cell, arm],
            "gain": mean_and_interval(gains[task, cell, arm]),
            **{
                key: mean_and_interval([row[key] for row in group])
                for key in ("final", "greedy", "area", "largest_fall", "entropy_ratio", "gradient_peak")
            },
            "collapsed": statistics.mean(row["is_collapsed"] for row in group),
            "undefined_gradients": sum(row["undefined_gradients"] for row in group),
            **{
                key: round(statistics.mean(row[key] for row in group), 4)
                for key in ("at_start", "at_end")
                if key in group[0]
            },
            "ratios_at_gradient_peak": [
                row["ratio_at_gradient_peak"] for row in group if "ratio_at_gradient_peak" in row
            ],
            "tokens_per_update": round(statistics.mean(row["tokens_per_update"] for row in group)),
            "generated_tokens": round(statistics.mean(row["generated_tokens"] for row in group)),
            "seconds_per_update": round(statistics.median(row["seconds"] / row["updates"] for row in group), 3),
            "means": {
                name: round(statistics.mean(row["means"][name] for row in group), 4)
                for name in group[0]["means"]
                if all(name in row["means"] for row in group)
            },
        }
        for (task, cell, arm), group in groups.items()
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="full", help="size of the study")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; 0: report what is finished, make none")
    parser.add_argument("--finished", type=Path, help="file of finished runs (outputs/stability_<preset>.jsonl)")
    arguments = parser.parse_args()
    preset = PRESETS[arguments.preset]
    device = "cpu" if preset.args.get("use_cpu", True) else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("the preset gpu needs a GPU, and torch sees none.")
    finished = arguments.finished or ROOT / "outputs" / f"stability_{arguments.preset}.jsonl"
    if not arguments.jobs and not finished.exists():
        parser.error(f"--jobs 0 reports finished runs, and there is no {finished}: give another --jobs or --finished.")

    rows, compared, tried, runs_left = [], [], {}, 0
    for task in preset.updates:

        def make(runs: list[Run], measurements: int) -> list[tuple[Run, dict]]:
            specs = [preset.spec(run, measurements) for run in runs]
            results = [made["result"] for made in run_all(specs, finished, arguments.jobs)]
            return [(run, result) for run, result in zip(runs, results, strict=True) if result is not None]

        print(f"{task}:", flush=True)
        pilots = try_learning_rates(task, ARMS if preset.few_seeds else MAIN, preset, make)
        rates = {key: best_rate(accuracies) for key, accuracies in pilots.items()}
        tried[task] = [
            {
                "arm": arm,
                "cell": str(staleness),
                "accuracies": [[rate, round(accuracy, 4)] for rate, accuracy in by_rate.items()],
            }
            for (arm, staleness), by_rate in pilots.items()
        ]
        plan = Plan(preset, task, rates)
        runs, candidates = list(plan.reported()), list(plan.candidates())
        made = make(runs, 8)
        extra = list(more_seeds(preset, made))
        made += make(extra, 8)
        made_candidates = make(candidates, 8)
        rows += [condense(run, result) for run, result in made]
        compared += summarize([condense(run, result) for run, result in made_candidates])
        runs_left += len(runs) + len(extra) + len(candidates) - len(made) - len(made_candidates)

    settings = {
        **asdict(preset),
        "pilots": tried,
        "candidates": compared,
        "runs_left": runs_left,
        "threads": 1,
        "summary": summarize(rows),
    }
    if arguments.preset == "quick":
        path = finished.with_suffix(".json")
        path.write_text(json.dumps({"settings": settings, "results": rows}, indent=2) + "\n")
        print(f"Written: {path}")
    else:
        save_result("stability", device, settings, rows)


if __name__ == "__main__":
    main()
