"""The runs of the study: what makes their samples stale, the size of a study, and which runs it takes."""

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.training_run import TASK_SETTINGS

from .arms import ABLATION, ARMS, CANDIDATES, MAIN, ON_BOTH_TASKS, TRAINERS
from .summary import best_rate, pilot_accuracies


ROWS = {task: settings["per_device_train_batch_size"] for task, settings in TASK_SETTINGS.items()}
# Measurements on held-out problems, by what a run is for, and as many more in longer runs
MEASUREMENTS = {"pilot": 4, "reported": 8, "candidate": 8}


@dataclass(frozen=True)
class StalenessSetting:
    """
    What makes the samples of a run stale.

    Attributes:
        updates_per_generation (`int`):
            Optimizer updates between two generations.
        num_iterations (`int`):
            Passes over a generation that these updates make.
        replay_min_staleness (`int`, *optional*):
            If given, half of each batch comes from the replay queue, where it holds samples of a staleness of at least
            so many updates: at first it holds none.
    """

    updates_per_generation: int
    num_iterations: int = 1
    replay_min_staleness: int | None = None

    def args(self, micro_batches: int) -> dict:
        """Return what sets the staleness of a run whose updates have so many micro-batches."""
        queue = {
            "replay_fraction": 0.5,
            "replay_min_staleness": self.replay_min_staleness,
            "replay_capacity": 16384,
        }
        return {
            "steps_per_generation": self.updates_per_generation // self.num_iterations * micro_batches,
            "num_iterations": self.num_iterations,
            **(queue if self.replay_min_staleness else {}),
        }

    @property
    def name(self) -> str:
        """Name in rows and tables."""
        passes = f", {self.num_iterations} passes" if self.num_iterations > 1 else ""
        queue = f", queue from {self.replay_min_staleness}" if self.replay_min_staleness else ""
        return f"{self.updates_per_generation}{passes}{queue}"

    @property
    def length(self) -> int:
        """How many times as long as others its runs are: longer where samples get 64 updates old or more."""
        oldest = max(self.updates_per_generation, self.replay_min_staleness or 0)
        return 1 if oldest < 64 else 2 if oldest < 256 else 4

    @property
    def rate_setting(self) -> str:
        """Name of the setting whose learning rates this one takes, `"16"` or `"64"`."""
        return "64" if self.updates_per_generation == 64 else "16"


STALE = (StalenessSetting(16), StalenessSetting(64))
OTHERS = (
    StalenessSetting(4, num_iterations=4),
    StalenessSetting(16, num_iterations=4),
    StalenessSetting(64, num_iterations=4),
    StalenessSetting(4, replay_min_staleness=16),
)


@dataclass(frozen=True)
class Run:
    """A run of the study: what it is for (a key of `MEASUREMENTS`), and what it is compared on."""

    purpose: str
    task: str
    arm: str
    staleness: StalenessSetting
    learning_rate: float
    seed: int


@dataclass(frozen=True)
class Preset:
    """
    Size of a study.

    Attributes:
        updates (`dict[str, int]`):
            Tasks, with the updates of their runs, those of length 1.
        learning_rates (`dict[str, tuple[float, ...]]`):
            Grid of each task.
        ablation (`dict[str, tuple[str, ...]]`):
            Arms of the ablation that each task has.
        seeds (`tuple[int, ...]`):
            Seeds of the main arms.
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

    def spec(self, run: Run) -> dict:
        """Return what [`training_run.run`] takes."""
        settings = {**ARMS, **ABLATION}[run.arm]
        updates = self.updates[run.task] * run.staleness.length
        micro_batches = settings.get("gradient_accumulation_steps", 1)
        args = {**settings, **run.staleness.args(micro_batches), **self.args, "learning_rate": run.learning_rate}
        if micro_batches > 1:
            args["per_device_train_batch_size"] = ROWS[run.task] // micro_batches
        return {
            "task": run.task,
            "trainer": TRAINERS.get(run.arm, "BAPO"),
            "seed": run.seed,
            "generations": updates // run.staleness.updates_per_generation,
            "held_out_every": self.updates[run.task] // MEASUREMENTS[run.purpose],
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


def choose_learning_rates(
    task: str,
    arms: Sequence[str],
    preset: Preset,
    make: Callable[[list[Run]], list[dict]],
    settings: Sequence[StalenessSetting] = STALE,
) -> dict[tuple[str, str], float]:
    """
    Return the learning rate of each arm at 16 and at 64 updates per generation, the best of its pilots.

    Where the best lies at an end of the grid, the grid goes on beyond it, up to twice. A grid of one learning rate is
    not tried.

    Args:
        task (`str`):
            Name of the task.
        arms (sequence of `str`):
            Names of arms.
        preset (`Preset`):
            Size of the study.
        make (callable):
            Returns the rows of some runs.
        settings (sequence of [`StalenessSetting`], *optional*, defaults to `STALE`):
            Where pilots are made.
    """
    grids = {(arm, staleness): preset.learning_rates[task] for staleness in settings for arm in arms}
    if len(preset.learning_rates[task]) == 1:
        return {(arm, staleness.name): grid[0] for (arm, staleness), grid in grids.items()}
    for extension in range(3):
        runs = [
            Run("pilot", task, arm, staleness, rate, seed)
            for (arm, staleness), grid in grids.items()
            for rate in grid
            for seed in preset.pilot_seeds
        ]
        accuracies = pilot_accuracies(make(runs))
        best = {key: best_rate(by_rate) for key, by_rate in accuracies.items()}
        beyond = {key: {min(by_rate): 0.5, max(by_rate): 2.0}.get(best[key]) for key, by_rate in accuracies.items()}
        if extension == 2 or not any(beyond.values()):
            break
        for arm, staleness in grids:
            if factor := beyond.get((arm, staleness.name)):
                grids[arm, staleness] = (*grids[arm, staleness], best[arm, staleness.name] * factor)
    for (arm, name), by_rate in accuracies.items():
        described = ", ".join(f"{rate:g}: {accuracy:.3f}" for rate, accuracy in by_rate.items())
        print(f"  {arm}, {name}: {described}", flush=True)
    return best


@dataclass(frozen=True)
class Plan:
    """
    The runs of a task whose arms have a learning rate.

    Attributes:
        preset (`Preset`):
            Size of the study.
        task (`str`):
            Name of the task.
        rates (`dict[tuple[str, str], float]`):
            Learning rate by arm and updates per generation, `"16"` or `"64"`.
    """

    preset: Preset
    task: str
    rates: dict[tuple[str, str], float]

    def reported(self) -> Iterator[Run]:
        """Yield the runs of the tables, the most telling first."""
        preset = self.preset
        yield from self._runs("reported", MAIN, [*STALE, StalenessSetting(4)], preset.seeds)
        yield from self._runs("reported", ["GRPO"], [StalenessSetting(1)], preset.seeds)  # no bound has any effect
        yield from self._runs("reported", [arm for arm in ARMS if arm not in MAIN], STALE, preset.few_seeds)
        yield from self._runs("reported", preset.ablation[self.task], STALE, preset.few_seeds)
        yield from self._runs("reported", MAIN, OTHERS, preset.seeds)

    def more_seeds(self, rows: Iterable[dict]) -> Iterator[Run]:
        """Yield runs with the other seeds of the arms that end within reach (0.02) of the best at their staleness."""
        finals: dict[tuple[str, str], list[float]] = {}
        for row in rows:
            if row["arm"] in ARMS:
                finals.setdefault((row["staleness_setting"], row["arm"]), []).append(row["final"])
        means = {key: statistics.mean(ends) for key, ends in finals.items()}
        for staleness in STALE:
            by_arm = {arm: mean for (name, arm), mean in means.items() if name == staleness.name}
            in_reach = [arm for arm in by_arm if arm not in MAIN and by_arm[arm] >= max(by_arm.values()) - 0.02]
            yield from self._runs("reported", in_reach, [staleness], self.preset.seeds[len(self.preset.few_seeds) :])

    def candidates(self) -> Iterator[Run]:
        """Yield the runs that compare the candidates for the default with BAPO."""
        yield from self._runs("candidate", ["BAPO", *CANDIDATES], STALE, self.preset.candidate_seeds)

    def _runs(
        self, purpose: str, arms: Iterable[str], settings: Iterable[StalenessSetting], seeds: Iterable[int]
    ) -> Iterator[Run]:
        for staleness, seed, arm in itertools.product(settings, seeds, arms):
            key = ("BAPO" if arm in ABLATION else arm, staleness.rate_setting)
            if key in self.rates:
                yield Run(purpose, self.task, arm, staleness, self.rates[key], seed)
