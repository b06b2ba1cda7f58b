"""
Apply the rules of the study of few positive tokens, which were fixed before its runs (`studies/regime_pilot.yaml`), to
its results. Only `main` reads files.

    python -m benchmarks.regime_verdict  # prints the result of each rule for the finished runs
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import combinations
from statistics import fmean

from bapo_trl.compare.results import Row, read_rows
from bapo_trl.compare.statistics import Difference, differences, seeds_for
from benchmarks.common import RESULTS, best_rate
from benchmarks.rambling_totals import LIMITS


AGAINST, APART = "VESPO", "GSPO"
ARMS = ("GRPO", "clip-higher", "BAPO", "widest bounds", AGAINST, "VESPO, half the weight", APART)
OTHERS = 5  # arms that are compared with VESPO
RATES = (5e-5, 1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3, 3.2e-3)
LEVEL, MARGIN = 0.05, 0.1
DIFFERENCE, FEWEST, MOST = 0.03, 5, 12

Setting = tuple[int, float]  # updates per generation, positive contribution at the start


def setting_of(row: Row) -> Setting:
    """Return the setting of a row."""
    contributions = {limit: contribution for contribution, limit in LIMITS.items()}
    return row.sweep["steps_per_generation"], contributions[row.sweep["max_completion_length"]]


def finals_by_rate(pilot: Iterable[Row]) -> dict[Setting, dict[str, dict[float, float]]]:
    """Return the final accuracies of each method by learning rate; a failed run counts as 0."""
    found: dict[Setting, dict[str, dict[float, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in pilot:
        found[setting_of(row)][row.arm][row.sweep["learning_rate"]] = row.final or 0.0
    return found


def next_rate(finals: Mapping[float, float]) -> float | None:
    """Return the next learning rate of a method by rule 1: a neighbor of its best rate that was not run yet."""
    place = RATES.index(best_rate(finals))
    beside = [RATES[i] for i in (place - 1, place + 1) if 0 <= i < len(RATES)]
    return next((rate for rate in beside if rate not in finals), None)


def robustness(finals: Mapping[float, float]) -> float:
    """Return the lower final accuracy at half and at twice the best learning rate, for rule 3."""
    place = RATES.index(best_rate(finals))
    return min(
        finals[rate] for rate in RATES[max(0, place - 1) : place + 2] if rate in finals and rate != RATES[place]
    )


def number_of_seeds(rows: Iterable[Row]) -> int:
    """Return the number of seeds by rule 2, without a limit, from runs of several methods on the same seeds."""
    numbers = []
    for finals in by_setting(rows).values():
        for first, second in combinations(finals, 2):
            (found,) = differences(finals, [(first, second)])
            numbers.append(seeds_for(DIFFERENCE, found.values, comparisons=OTHERS) or FEWEST)
    return max(numbers)


def by_setting(rows: Iterable[Row]) -> dict[Setting, dict[str, dict[int, float]]]:
    """Return the final accuracies of each method by seed; a failed run counts as 0."""
    found: dict[Setting, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        found[setting_of(row)][row.arm][row.seed] = row.final or 0.0
    return found


def complete(rows: Iterable[Row]) -> list[Row]:
    """Return the runs of the seeds that all methods have in all settings: the study grows seed by seed."""
    rows = list(rows)
    seeds = set.intersection(*(set(by_seed) for finals in by_setting(rows).values() for by_seed in finals.values()))
    return [row for row in rows if row.seed in seeds]


def compared(finals: Mapping[str, Mapping[int, float]]) -> list[Difference]:
    """
    Return the difference in final accuracy between each method and VESPO in a setting, by rule 4.

    Raises:
        ValueError: If a method has other seeds than VESPO, as then runs are missing.
    """
    for arm, seeds in finals.items():
        if seeds.keys() != finals[AGAINST].keys() and arm != APART:
            raise ValueError(f"{arm} has seeds {sorted(seeds)}, and {AGAINST} has {sorted(finals[AGAINST])}.")
    return differences(finals, [(arm, AGAINST) for arm in finals if arm not in (AGAINST, APART)])


def named(finals: Mapping[str, Mapping[int, float]], robust: Mapping[str, float]) -> str:
    """Return the best method of a setting by rule 5."""
    chosen = {}
    for found in compared(finals):
        is_clear = found.p_value < LEVEL
        is_more_robust = robust[found.arm] - robust[AGAINST] >= MARGIN
        if (is_clear and found.mean.value > 0) or (not is_clear and is_more_robust):
            chosen[found.arm] = fmean(finals[found.arm].values()) + robust[found.arm]
    return max(chosen, key=chosen.__getitem__, default=AGAINST)


def threshold(names: Mapping[float, str]) -> tuple[str, float] | None:
    """Return the recommended method at a staleness and its largest contribution, by rule 6; `None` for VESPO."""
    contributions = sorted(names)
    arm, last = names[contributions[0]], contributions[0]
    for contribution in contributions:
        if names[contribution] != arm:
            break
        last = contribution
    return None if arm == AGAINST else (arm, last)


def best_methods(rows: Iterable[Row], pilot: Iterable[Row]) -> dict[int, dict[float, str]]:
    """Return the best method of each setting by rule 5: by updates per generation, then by contribution."""
    rates, best = finals_by_rate(pilot), defaultdict(dict)
    for (updates, contribution), finals in sorted(by_setting(rows).items()):
        robust = {arm: robustness(by_rate) for arm, by_rate in rates[updates, contribution].items()}
        best[updates][contribution] = named(finals, robust)
    return best


def advice(best: Mapping[float, str]) -> str:
    """Return the advice at a staleness by rule 6, as text, from the best method by contribution."""
    found = threshold(best)
    return f"{found[0]} up to a contribution of {found[1]:g}" if found else f"nothing changes, {AGAINST}"


def main() -> None:
    pilot = list(read_rows(RESULTS / "regime_pilot.json").values())
    for setting, arms in finals_by_rate(pilot).items():
        for arm, finals in arms.items():
            print(*setting, arm, f"best {best_rate(finals):g}, next {next_rate(finals) or '-'}", dict(finals))
    seeds = number_of_seeds(read_rows(RESULTS / "regime_spread.json").values())
    print(f"seeds to show {DIFFERENCE}: {seeds}; at least {FEWEST} and at most {MOST} are run")
    for updates, best in best_methods(complete(read_rows(RESULTS / "regime.json").values()), pilot).items():
        print(f"{updates} updates per generation: {advice(best)}", best)


if __name__ == "__main__":
    main()
