"""
The study of few positive tokens: its settings, its rules (`studies/regime_pilot.yaml`), and what it measured besides.

    python -m benchmarks.few_positive                   # prints the method that each setting names by rule 5
    python -m benchmarks.few_positive --contributions   # from outputs/regime; writes results/regime_contributions.json

A contribution is the mean of `bapo/positive_share_initial` over the updates of a part of a BAPO run.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean

from bapo_trl.compare.results import Row, read_rows
from bapo_trl.compare.statistics import Difference, differences
from benchmarks.common import RESULTS, ROOT, best_rate, save_result
from benchmarks.rambling_totals import LIMITS


AGAINST, APART = "VESPO", "GSPO"
ARMS = ("GRPO", "clip-higher", "BAPO", "wide fixed bounds", AGAINST, "VESPO, half the weight", APART)
LEVEL, MARGIN = 0.05, 0.1
PARTS = {f"{first} to {last}": range(first, last + 1) for first, last in ((1, 10), (11, 64), (65, 128), (129, 256))}
"""Updates of each part of a training, by name."""

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


def by_setting(rows: Iterable[Row]) -> dict[Setting, dict[str, dict[int, float]]]:
    """Return the final accuracies of each method by seed; a failed run counts as 0."""
    found: dict[Setting, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        found[setting_of(row)][row.arm][row.seed] = row.final or 0.0
    return found


def complete(rows: Iterable[Row]) -> list[Row]:
    """Return the runs of the seeds that all methods have in all settings: the study grew seed by seed."""
    rows = list(rows)
    seeds = set.intersection(*(set(by_seed) for finals in by_setting(rows).values() for by_seed in finals.values()))
    return [row for row in rows if row.seed in seeds]


def robustness(finals: Mapping[float, float]) -> float:
    """Return the lower final accuracy at half and at twice the best learning rate, for rule 3."""
    best = best_rate(finals)
    return min(finals[rate] for rate in (best / 2, best * 2) if rate in finals)


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


def contributions(trainer_state: Path) -> dict[str, float]:
    """Return the mean contribution in each part of a run; updates without a contributing token have none."""
    name = "bapo/positive_share_initial"
    logs = json.loads(trainer_state.read_text())["log_history"]
    values = {log["step"]: log[name] for log in logs if name in log}
    return {part: round(fmean(values[step] for step in steps if step in values), 4) for part, steps in PARTS.items()}


def save_contributions() -> None:
    folder = ROOT / "outputs" / "regime"
    runs = {(*setting_of(row), row.seed): key for key, row in read_rows(folder).items() if row.arm == "BAPO"}
    results = [
        {
            **dict(zip(("updates_per_generation", "contribution", "seed"), run, strict=True)),
            **contributions(folder / "logs" / f"{key}.trainer_state.json"),
        }
        for run, key in sorted(runs.items())
    ]
    save_result("regime_contributions", {"method": "BAPO"}, results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contributions", action="store_true", help="measure them, from the logs of the runs")
    if parser.parse_args().contributions:
        return save_contributions()
    pilot = finals_by_rate(read_rows(RESULTS / "regime_pilot.json").values())
    for setting, finals in sorted(by_setting(complete(read_rows(RESULTS / "regime.json").values())).items()):
        robust = {arm: robustness(by_rate) for arm, by_rate in pilot[setting].items()}
        print(*setting, named(finals, robust), robust)


if __name__ == "__main__":
    main()
