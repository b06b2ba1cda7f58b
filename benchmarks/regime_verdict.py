"""
Pure, but for `main`: what the rules of the study of few positive tokens, written before its runs, say of its rows
(`studies/regime_pilot.yaml`).

    python -m benchmarks.regime_verdict  # prints what each rule says of the rows that there are
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from statistics import fmean

from bapo_trl.compare.results import Row, read_rows
from bapo_trl.compare.statistics import Difference, differences, seeds_for
from benchmarks.common import RESULTS
from benchmarks.rambling_totals import LIMITS


AGAINST, APART = "VESPO", "GSPO"
OTHERS = 5  # arms that are compared with VESPO
RATES = (5e-5, 1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3, 3.2e-3)
LEVEL, MARGIN = 0.05, 0.1
DIFFERENCE, FEWEST, MOST = 0.03, 5, 12
STALENESSES = (16, 64)

Setting = tuple[int, float]  # updates per generation, positive contribution at the start


def setting_of(row: Row) -> Setting:
    """Return the setting of a row."""
    contributions = {limit: contribution for contribution, limit in LIMITS.items()}
    return row.sweep["steps_per_generation"], contributions[row.sweep["max_completion_length"]]


def finals_by_rate(pilot: Iterable[Row]) -> dict[Setting, dict[str, dict[float, float]]]:
    """Return the final accuracy of each arm by its rate; a run that failed has learned nothing."""
    found: dict[Setting, dict[str, dict[float, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in pilot:
        found[setting_of(row)][row.arm][row.sweep["learning_rate"]] = row.final or 0.0
    return found


def best_rate(finals: Mapping[float, float]) -> float:
    """Return the rate of the highest final accuracy by rule 1, the lower one of equals."""
    return min(finals, key=lambda rate: (-finals[rate], rate))


def next_rate(finals: Mapping[float, float]) -> float | None:
    """Return the rate that an arm is still to run at by rule 1: the one beside its best, if it has not run there."""
    place = RATES.index(best_rate(finals))
    beside = [RATES[i] for i in (place - 1, place + 1) if 0 <= i < len(RATES)]
    return next((rate for rate in beside if rate not in finals), None)


def robustness(finals: Mapping[float, float]) -> float:
    """Return the lower one of the final accuracies at half and at twice the best rate, of rule 3."""
    place = RATES.index(best_rate(finals))
    return min(
        finals[rate] for rate in RATES[max(0, place - 1) : place + 2] if rate in finals and rate != RATES[place]
    )


def number_of_seeds(rows: Iterable[Row]) -> int:
    """Return the number of seeds by rule 2, unbounded, from runs of some arms on the same seeds."""
    numbers = []
    for finals in by_setting(rows).values():
        for first, second in combinations(finals, 2):
            (found,) = differences(finals, [(first, second)])
            numbers.append(seeds_for(DIFFERENCE, found.values, comparisons=OTHERS) or FEWEST)
    return max(numbers)


def by_setting(rows: Iterable[Row]) -> dict[Setting, dict[str, dict[int, float]]]:
    """Return the final accuracy of each arm by seed; a run that failed has learned nothing."""
    found: dict[Setting, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        found[setting_of(row)][row.arm][row.seed] = row.final or 0.0
    return found


def compared(finals: Mapping[str, Mapping[int, float]]) -> list[Difference]:
    """
    Return how far each arm ends above VESPO in a setting, by rule 4.

    Raises:
        ValueError: If arms have other seeds than VESPO, as then not all runs are there.
    """
    for arm, seeds in finals.items():
        if seeds.keys() != finals[AGAINST].keys() and arm != APART:
            raise ValueError(f"{arm} has seeds {sorted(seeds)}, and {AGAINST} has {sorted(finals[AGAINST])}.")
    return differences(finals, [(arm, AGAINST) for arm in finals if arm not in (AGAINST, APART)])


def named(finals: Mapping[str, Mapping[int, float]], robust: Mapping[str, float]) -> str:
    """Return the arm that a setting names by rule 5."""
    chosen = {}
    for found in compared(finals):
        is_clear = found.p_value < LEVEL
        is_more_robust = robust[found.arm] - robust[AGAINST] >= MARGIN
        if (is_clear and found.mean.value > 0) or (not is_clear and is_more_robust):
            chosen[found.arm] = fmean(finals[found.arm].values()) + robust[found.arm]
    return max(chosen, key=chosen.__getitem__, default=AGAINST)


def threshold(names: Mapping[float, str]) -> tuple[str, float] | None:
    """Return the arm that the advice names at a staleness by rule 6, and up to what contribution; `None`: VESPO."""
    contributions = sorted(names)
    arm, last = names[contributions[0]], contributions[0]
    for contribution in contributions:
        if names[contribution] != arm:
            break
        last = contribution
    return None if arm == AGAINST else (arm, last)


def verdict(rows: Iterable[Row], pilot: Iterable[Row]) -> Iterator[str]:
    """Yield what rules 5 and 6 say, a line each."""
    rates, names = finals_by_rate(pilot), defaultdict(dict)
    for (updates, contribution), finals in sorted(by_setting(rows).items()):
        robust = {arm: robustness(by_rate) for arm, by_rate in rates[updates, contribution].items()}
        arm = names[updates][contribution] = named(finals, robust)
        yield f"{updates} updates per generation, contribution {contribution:g}: {arm}"
    for updates, by_contribution in names.items():
        found = threshold(by_contribution)
        text = f"{found[0]} up to a contribution of {found[1]:g}" if found else f"nothing changes, {AGAINST}"
        yield f"advice at {updates} updates per generation: {text}"


def main() -> None:
    pilot = list(read_rows(RESULTS / "regime_pilot.json").values())
    for setting, arms in finals_by_rate(pilot).items():
        for arm, finals in arms.items():
            print(*setting, arm, f"best {best_rate(finals):g}, next {next_rate(finals) or '-'}", dict(finals))
    if (RESULTS / "regime.json").exists():
        print(*verdict(read_rows(RESULTS / "regime.json").values(), pilot), sep="\n")


if __name__ == "__main__":
    main()
