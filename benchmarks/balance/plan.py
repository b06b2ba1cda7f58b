"""The runs of the study of the balance."""

import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.run_pool import run_key
from benchmarks.stability.plan import FULL, Preset, Run, StalenessSetting, choose_learning_rates

from .arms import (
    ARMS,
    CARRIED_OVER,
    CONSTANT,
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


PRESET = BalancePreset(**vars(FULL))


def choose_rate(task: str, staleness: StalenessSetting, arm: str, make: Make) -> float | None:
    """Return the learning rate of an arm, the best of its pilots; `None` if none of them is made."""
    grid = SETTINGS[task, staleness]
    if arm in LOW_RATES:
        grid = tuple(rate / 2 for rate in grid)
    preset = replace(PRESET, learning_rates={task: grid})
    return choose_learning_rates(task, [arm], preset, make, [staleness]).get((arm, staleness.name))


def make_study(make: Make, first_study: Sequence[dict], arms: Sequence[str] = (*ARMS, *REPEATED)) -> None:
    """
    Make the runs of the study, setting by setting.

    Args:
        make (callable):
            Returns the rows of some runs, fewer than runs if some are not made now.
        first_study (sequence of `dict`):
            Rows of `benchmarks.stability`, whose learning rates the published methods take.
        arms (sequence of `str`, *optional*):
            Keys of `ARMS` and `REPEATED`; all of them by default.
    """
    known = {
        (row["task"], row["staleness_setting"], row["arm"]): row["learning_rate"]
        for row in first_study
        if row["purpose"] == "reported"
    }
    shares: dict[tuple[str, str], list[dict]] = {}
    for task, staleness in SETTINGS:
        print(f"{task}, {staleness.name}:", flush=True)
        rows: list[dict] = []
        for arm in ARMS:
            if arm in arms and (rate := choose_rate(task, staleness, arm, make)):
                rows += make([Run("reported", task, arm, staleness, rate, seed) for seed in SEEDS])
        rates = {arm: known[task, staleness.name, NAMES_BEFORE.get(arm, arm)] for arm in REPEATED if arm in arms}
        rows += make(
            [Run("reported", task, arm, staleness, rates[arm], seed) for arm, seed in itertools.product(rates, SEEDS)]
        )
        make(list(more_seeds(rows)))
        shares[task, staleness.name] = best_share(rows)
    for task, staleness in SETTINGS:
        make(list(controls(shares[task, staleness.name], shares[_other_task(task), staleness.name])))


def best_share(rows: Sequence[dict]) -> list[dict]:
    """Return the rows of the best of the arms that are named for their share alone; empty if there are none."""
    groups = _by_arm([row for row in rows if row["arm"].startswith("share") and row["arm"].count(",") == 0])
    return max(groups.values(), key=lambda group: statistics.mean(row["final"] for row in group), default=[])


def controls(best: Sequence[dict], elsewhere: Sequence[dict]) -> Iterator[Run]:
    """
    Yield the runs that ask what of the best share matters, on its seeds and at its learning rate.

    Its weights in another order, on the positive tokens instead, carried over; and constant weights: the mean of its
    own, and that of the best share on the other task.

    Args:
        best (sequence of `dict`):
            Rows of the best share of a setting.
        elsewhere (sequence of `dict`):
            Those of the other task.
    """
    for row in best:
        if row["seed"] not in SEEDS:
            continue
        variants = [variant(row["arm"], name) for name in (SHUFFLED, WEIGHED_UP, *CARRIED_OVER)]
        for arm in [*variants, *(f"{CONSTANT}{_mean_weight(rows):.2f}" for rows in (best, elsewhere) if rows)]:
            staleness = StalenessSetting(int(row["staleness_setting"]))
            yield Run("reported", row["task"], arm, staleness, row["learning_rate"], row["seed"])


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
