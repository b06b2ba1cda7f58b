"""The runs of the study of the balance."""

import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.run_pool import run_key
from benchmarks.stability.plan import FULL, Preset, Run, StalenessSetting, choose_learning_rates
from benchmarks.training_run import RUNNING_TOTALS

from .arms import (
    ARMS,
    CARRIED_OVER,
    CONSTANT,
    CONTROLLED,
    NAMES_BEFORE,
    REPEATED,
    SHUFFLED,
    WEIGHED_UP,
    settings_of,
    variant,
)


Make = Callable[[list[Run]], list[dict]]
# Task and staleness, the short task first; where the grids of learning rates begin. They go on beyond their ends.
SETTINGS = {
    ("sums", StalenessSetting(64)): (2.5e-4, 5e-4, 1e-3),
    ("sums", StalenessSetting(16)): (2.5e-4, 5e-4, 1e-3),
    ("running_totals", StalenessSetting(64)): (4e-4, 8e-4, 1.6e-3),
    ("running_totals", StalenessSetting(16)): (2e-4, 4e-4, 8e-4),
}
LOW_RATES = ("widest, cap", "share 0.6", "BAPO, weight")  # whose grids begin at half of that
SEEDS, MORE_SEEDS = FULL.few_seeds, FULL.seeds[len(FULL.few_seeds) :]
K = 4  # of pass@k
LITTLE_WEIGHED = 0.9  # mean weight of an arm from which on weights hardly differ from none
IN_REACH = 0.02


@dataclass(frozen=True)
class BalancePreset(Preset):
    """
    Size of the first study, with the arms of this one and pass@k in the runs that are reported.

    Attributes:
        rows (`dict[str, dict]`):
            Rows of finished runs by key. A variant with shuffled weights takes those of its arm from there.
    """

    rows: dict[str, dict] = field(default_factory=dict)

    def spec(self, run: Run) -> dict:
        """Return what [`training_run.run`] takes."""
        spec = super().spec(replace(run, arm="BAPO"))
        spec["args"] |= settings_of(run.arm)
        if run.purpose == "reported":
            spec["k"] = K
        arm, _, name = run.arm.partition("; ")
        if name == WEIGHED_UP:
            spec["trainer"] = "weighed up"
        elif name == SHUFFLED:
            row = self.rows[run_key(self.spec(replace(run, arm=arm)))]
            weights = list(row["weights"])
            random.Random(run.seed).shuffle(weights)
            spec |= {"trainer": "given weights", "weights": weights}
        return spec


_updates = {**FULL.updates, **dict.fromkeys(RUNNING_TOTALS, FULL.updates["running_totals"])}  # the variants' as well
PRESET = BalancePreset(**{**vars(FULL), "updates": _updates})


@dataclass(frozen=True)
class Further:
    """
    A question to some of the arms, on three seeds: staler samples, longer completions or a larger model.

    Attributes:
        task (`str`):
            Name of the task.
        staleness ([`StalenessSetting`]):
            What makes samples stale.
        arms (sequence of `str`):
            Keys of `ARMS` and `REPEATED`.
        learning_rates (`tuple[float, ...]`, *optional*):
            Grid of the pilots. By default, an arm has its learning rate of 64 updates per generation, that on the hard
            task if the task is a variant of it.
    """

    task: str
    staleness: StalenessSetting
    arms: Sequence[str]
    learning_rates: tuple[float, ...] = ()

    @property
    def tuned_on(self) -> tuple[str, str]:
        """Task and name of the staleness setting that the learning rates come from where there are no pilots."""
        return ("sums" if self.task == "sums" else "running_totals", "64")


BEST = ("VESPO, constant weight 0.5", "VESPO, share 0.8", "VESPO")
FURTHER = (
    Further("sums", StalenessSetting(256, num_iterations=4), (*BEST, "GRPO"), (2.5e-4, 5e-4, 1e-3)),
    Further("sums", StalenessSetting(16, replay_min_staleness=64), (*BEST, "GRPO")),
    Further("running_totals_long", StalenessSetting(64), (*BEST, "BAPO", "widest")),
    Further("running_totals_larger_model", StalenessSetting(64), (*BEST, "BAPO")),
    Further("running_totals_longer", StalenessSetting(64), (*BEST, "BAPO", "widest")),
)


def grid_of(task: str, staleness: StalenessSetting, arm: str) -> tuple[float, ...]:
    """Return where the grid of learning rates of an arm begins, in one of `SETTINGS`."""
    grid = SETTINGS[task, staleness]
    return tuple(rate / 2 for rate in grid) if arm in LOW_RATES else grid


def choose_rate(task: str, staleness: StalenessSetting, arm: str, grid: tuple[float, ...], make: Make) -> float | None:
    """Return the learning rate of an arm, the best of its pilots; `None` if none of them is made."""
    preset = replace(PRESET, learning_rates={task: grid})
    return choose_learning_rates(task, [arm], preset, make, [staleness]).get((arm, staleness.name))


def make_study(make: Make, first_study: Sequence[dict], arms: Sequence[str] = (*ARMS, *REPEATED)) -> None:
    """
    Make the runs of the study, setting by setting, what takes long last.

    Args:
        make (callable):
            Returns the rows of some runs, fewer than runs if some are not made now.
        first_study (sequence of `dict`):
            Rows of `benchmarks.stability`, whose learning rates the published methods take.
        arms (sequence of `str`, *optional*):
            Keys of `ARMS` and `REPEATED`; all of them by default.
    """
    rates: dict[tuple, float | None] = {
        (row["task"], row["staleness_setting"], arm): row["learning_rate"]
        for row in first_study
        for arm in REPEATED
        if row["purpose"] == "reported" and row["arm"] == NAMES_BEFORE.get(arm, arm)
    }
    groups: dict[tuple, list[dict]] = {}  # by task, staleness setting and arm
    for task, staleness in SETTINGS:
        print(f"{task}, {staleness.name}:", flush=True)
        rows = []
        for arm in (*ARMS, *REPEATED):
            if arm in ARMS and arm in arms:
                grid = grid_of(task, staleness, arm)
                rates[task, staleness.name, arm] = choose_rate(task, staleness, arm, grid, make)
            if arm in arms and (rate := rates[task, staleness.name, arm]):
                rows += make([Run("reported", task, arm, staleness, rate, seed) for seed in SEEDS])
        make(list(more_seeds(rows)))
        groups |= {(task, staleness.name, arm): group for arm, group in _by_arm(rows).items()}
    easy, hard = dict.fromkeys(task for task, _ in SETTINGS)
    make_controls(easy, groups, make)
    for question in FURTHER:
        make_further(question, rates, arms, make)
    make_controls(hard, groups, make)


def make_controls(task: str, groups: dict[tuple, list[dict]], make: Make) -> None:
    """Make the runs that ask what of a share matters on a task."""
    for (other, staleness), arm in itertools.product(SETTINGS, CONTROLLED):
        if other == task:
            own, elsewhere = (groups.get((name, staleness.name, arm), []) for name in (task, _other_task(task)))
            make(list(controls(own, elsewhere)))


def make_further(
    question: Further,
    rates: dict[tuple, float | None],
    arms: Sequence[str],
    make: Make,
) -> None:
    """Make the runs of a question to those of its arms that are among these, seed by seed."""
    task, staleness = question.task, question.staleness
    print(f"{task}, {staleness.name}:", flush=True)
    chosen: dict[str, float | None] = {}
    for arm in (arm for arm in question.arms if arm in arms):
        if question.learning_rates:
            chosen[arm] = choose_rate(task, staleness, arm, question.learning_rates, make)
        else:
            chosen[arm] = rates[*question.tuned_on, arm]
    runs = itertools.product(SEEDS, [arm for arm in chosen if chosen[arm]])
    make([Run("reported", task, arm, staleness, chosen[arm], seed) for seed, arm in runs])


def controls(own: Sequence[dict], elsewhere: Sequence[dict]) -> Iterator[Run]:
    """
    Yield the runs that ask what of a share matters, on its seeds and at its learning rate.

    Its weights in another order, on the positive tokens instead, carried over; and constant weights: the mean of its
    own, and that of the same arm on the other task. Without those whose weights would hardly differ from 1.

    Args:
        own (sequence of `dict`):
            Rows of an arm with a share in a setting.
        elsewhere (sequence of `dict`):
            Those of the other task.
    """
    weighed = [rows for rows in (own, elsewhere) if rows and _mean_weight(rows) < LITTLE_WEIGHED]
    names = dict.fromkeys(map(constant, weighed))
    if own in weighed:
        names |= {variant(own[0]["arm"], name): None for name in (SHUFFLED, WEIGHED_UP, CARRIED_OVER)}
    for row, arm in itertools.product([row for row in own if row["seed"] in SEEDS], names):
        staleness = StalenessSetting(int(row["staleness_setting"]))
        yield Run("reported", row["task"], arm, staleness, row["learning_rate"], row["seed"])


def constant(rows: Sequence[dict]) -> str:
    """Return the name of the arm of a constant weight, the mean of those of an arm with a share."""
    of_vespo = "VESPO, " if rows[0]["arm"].startswith("VESPO") else ""
    return f"{of_vespo}{CONSTANT}{_mean_weight(rows):.2f}"


def _other_task(task: str) -> str:
    return next(other for other, _ in SETTINGS if other != task)


def _mean_weight(rows: Sequence[dict]) -> float:
    return statistics.mean(weight for row in rows for weight in row["weights"] if weight is not None)


def _by_arm(rows: Sequence[dict]) -> dict[str, list[dict]]:
    groups: dict[str, list[dict]] = {}
    for row in rows:
        groups.setdefault(row["arm"], []).append(row)
    return groups


def more_seeds(rows: Sequence[dict]) -> Iterator[Run]:
    """Yield runs with two seeds more of the arms of a setting that end within reach of the best."""
    groups = _by_arm(rows)
    means = {arm: statistics.mean(row["final"] for row in group) for arm, group in groups.items()}
    for arm, mean in means.items():
        row = groups[arm][0]
        if mean >= max(means.values()) - IN_REACH:
            for seed in MORE_SEEDS:
                staleness = StalenessSetting(int(row["staleness_setting"]))
                yield Run("reported", row["task"], arm, staleness, row["learning_rate"], seed)
