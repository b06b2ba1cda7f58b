"""
Measure the positive contribution over training in the study of few positive tokens, from the logs of its BAPO runs.

    python -m benchmarks.regime_contributions  # from outputs/regime; writes results/regime_contributions.json

It is the mean of `bapo/positive_share_initial` over the updates of a part of the training.
"""

import json
from pathlib import Path
from statistics import fmean

from bapo_trl.compare.results import read_rows
from benchmarks.common import ROOT, save_result
from benchmarks.regime_verdict import setting_of


PARTS = {f"{first} to {last}": range(first, last + 1) for first, last in ((1, 10), (11, 64), (65, 128), (129, 256))}
"""Updates of each part of a training, by name."""


def contributions(trainer_state: Path) -> dict[str, float]:
    """Return the mean contribution in each part of a run; updates without a contributing token have none."""
    name = "bapo/positive_share_initial"
    logs = json.loads(trainer_state.read_text())["log_history"]
    values = {log["step"]: log[name] for log in logs if name in log}
    return {part: round(fmean(values[step] for step in steps if step in values), 4) for part, steps in PARTS.items()}


def main() -> None:
    folder = ROOT / "outputs" / "regime"
    runs = {(*setting_of(row), row.seed): key for key, row in read_rows(folder).items() if row.arm == "BAPO"}
    results = [
        {
            "updates_per_generation": updates,
            "contribution": contribution,
            "seed": seed,
            **contributions(folder / "logs" / f"{key}.trainer_state.json"),
        }
        for (updates, contribution, seed), key in sorted(runs.items())
    ]
    save_result("regime_contributions", {"method": "BAPO"}, results)


if __name__ == "__main__":
    main()
