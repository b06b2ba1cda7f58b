"""
Write the next studies of few positive tokens from the results of the pilot, by the rules in
`studies/regime_pilot.yaml`.

    python -m benchmarks.regime_studies rates          # rule 1: the next learning rates, until there are none
    python -m benchmarks.regime_studies spread         # rule 2: runs that determine the number of seeds
    python -m benchmarks.regime_studies main --seeds 8 # the runs to compare

Writes `outputs/studies/regime_STAGE_*.yaml`, and prints the commands for the runs. Seeds whose runs are all in
`results/` are left out: a machine continues where another stopped, after `python -m benchmarks.pages --keep`.
"""

import argparse
from collections.abc import Iterable, Iterator
from typing import Any

import yaml

from bapo_trl.compare.results import Row, read_rows
from benchmarks.common import RESULTS, ROOT, best_rate
from benchmarks.rambling_totals import LIMITS
from benchmarks.regime_verdict import Setting, by_setting, finals_by_rate, next_rate


FOLDERS = {"rates": "regime_pilot", "spread": "regime_spread", "main": "regime"}
SPREAD_ARMS, SPREAD_SEEDS = ("GRPO", "BAPO", "VESPO"), [1001, 1002, 1003, 1004, 1005]


def studies(
    stage: str,
    pilot: dict[str, Any],
    finals: dict[Setting, dict[str, dict[float, float]]],
    seeds: int = 0,
    kept: Iterable[Row] = (),
) -> Iterator[dict[str, Any]]:
    """Yield the studies of a stage: one per setting or, in the stage `rates`, one per setting and learning rate."""
    made = by_setting(kept)
    for (updates, contribution), arms in finals.items():
        over = {"steps_per_generation": [updates], "max_completion_length": [LIMITS[contribution]]}
        if stage == "rates":
            rates = {arm: next_rate(by_rate) for arm, by_rate in arms.items()}
            for rate in sorted({rate for rate in rates.values() if rate}):
                chosen = {arm: flags for arm, flags in pilot["arms"].items() if rates.get(arm) == rate}
                yield pilot | {"arms": chosen, "over": over | {"learning_rate": [rate]}}
        elif stage == "main" or contribution == min(LIMITS):
            chosen = {
                arm: flags | {"learning_rate": best_rate(arms[arm])}
                for arm, flags in pilot["arms"].items()
                if arm in arms and (stage == "main" or arm in SPREAD_ARMS)
            }
            wanted = SPREAD_SEEDS if stage == "spread" else range(seeds)
            there = set.intersection(*(set(made[updates, contribution][arm]) for arm in chosen))
            if missing := [seed for seed in wanted if seed not in there]:
                yield pilot | {"arms": chosen, "over": over, "seeds": missing}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=FOLDERS)
    parser.add_argument("--seeds", type=int, default=0, help="number of seeds of the runs that are compared")
    options = parser.parse_args()
    pilot = yaml.safe_load((ROOT / "benchmarks" / "studies" / "regime_pilot.yaml").read_text())
    finals = finals_by_rate(read_rows(RESULTS / "regime_pilot.json").values())
    results = RESULTS / f"{FOLDERS[options.stage]}.json"
    kept = read_rows(results).values() if results.exists() else ()
    folder = ROOT / "outputs" / "studies"
    folder.mkdir(parents=True, exist_ok=True)
    for number, study in enumerate(studies(options.stage, pilot, finals, options.seeds, kept), start=1):
        path = folder / f"regime_{options.stage}_{number:02}.yaml"
        path.write_text(yaml.safe_dump(study, sort_keys=False))
        print(f"bapo-trl compare {path.relative_to(ROOT)} --output_dir outputs/{FOLDERS[options.stage]}")


if __name__ == "__main__":
    main()
