"""
Run the demo of the chat model from several seeds: held-out accuracy before and after, and how long it takes.

    python -m benchmarks.llm_demo

Each run is `python demo_llm.py` in a process of its own, as users run it. An interrupted benchmark goes on where it
stopped: finished seeds are kept in a file.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean

from bapo_trl.tasks import smollm2_path
from benchmarks.common import ROOT, Section, provenance, save_result, table, verdict


SEEDS = (42, 43, 44)
TARGET_GAIN, TARGET_TRAINING_S, TARGET_ALL_S = 0.15, 12 * 60, 18 * 60
COLUMNS = {
    "greedy": "Greedy",
    "sampled": "Mean of 4 samples",
    "ended": "Ended",
    "without_limit": "Greedy, at most 96 tokens",
}


def run(seed: int, folder: Path) -> dict:
    """Run the demo from `seed`, unless its results are there, and return them."""
    results = folder / str(seed) / "demo_results.json"
    if not results.exists():
        command = [sys.executable, "demo_llm.py", "--seed", str(seed), "--output_dir", str(results.parent)]
        subprocess.run(command, cwd=ROOT, check=True)
    return {"seed": seed, **json.loads(results.read_text())}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="seeds to train from")
    parser.add_argument("--runs", type=Path, default=ROOT / "outputs" / "llm_demo", help="folder of the runs")
    args = parser.parse_args()
    smollm2_path()  # so that no run's time has it
    results = []
    for seed in args.seeds:
        results.append(run(seed, args.runs))
        print(results[-1], flush=True)
    settings = {"target_gain": TARGET_GAIN, "target_training_s": TARGET_TRAINING_S, "target_all_s": TARGET_ALL_S}
    save_result("llm_demo", "cpu", settings, results)


def render(content: dict) -> Section:
    """Return the section of a result."""
    settings, rows = content["settings"], content["results"]
    cells = []
    for row in rows:
        values = [f"{row['before'][key]:.3f} to {row['after'][key]:.3f}" for key in COLUMNS]
        gain = row["after"]["greedy"] - row["before"]["greedy"]
        is_met = (
            gain >= settings["target_gain"]
            and row["training_s"] <= settings["target_training_s"]
            and row["all_s"] <= settings["target_all_s"]
        )
        cells.append([str(row["seed"]), *values, verdict(is_met), f"{row['training_s']}, {row['all_s']}"])
    gain = mean(row["after"]["greedy"] - row["before"]["greedy"] for row in rows)
    text = [
        "## A chat model learns sums",
        "`make demo-llm` trains SmolLM2-135M-Instruct with LoRA on sums of two numbers below 100, asked in words, and "
        f"measures {rows[0]['problems']} held-out problems before and after. An answer counts by its last number. "
        "Training allows 16 tokens, and so do the figures but for the last: shorter answers alone would be right "
        "more often under the limit. Ended is the share of greedy completions that ended by themselves.",
        f"Target: greedy accuracy up by at least {settings['target_gain']}, training in at most "
        f"{settings['target_training_s'] // 60} minutes and all of it in {settings['target_all_s'] // 60}. Mean gain: "
        f"{gain:+.3f}.",
        table(["Seed", *COLUMNS.values(), "Met", "Seconds of training, in all"], cells),
        provenance(content),
    ]
    return Section("\n\n".join(text))


if __name__ == "__main__":
    main()
