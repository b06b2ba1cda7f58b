"""
Run the quickstart recipe from several seeds: accuracy on held-out problems before and after, and how long it takes.

    python -m benchmarks.quickstart

Each run is `python train_bapo.py` in a process of its own, as users run it. The first seed's report becomes the
picture of the README.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bapo_trl.tasks import warm_start_path
from benchmarks.common import ROOT, Section, provenance, save_result, table, verdict


ACCURACY = re.compile(r"greedy ([\d.]+) -> ([\d.]+), mean of 4 samples ([\d.]+) -> ([\d.]+)")


def run(seed: int, output_dir: Path) -> dict:
    """Train from `seed` and return what the script printed at its end."""
    command = [sys.executable, "train_bapo.py", "--seed", str(seed), "--output_dir", str(output_dir)]
    started = time.perf_counter()
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    values = [float(value) for value in ACCURACY.search(output).groups()]
    names = ("greedy_before", "greedy_after", "sampled_before", "sampled_after")
    return {"seed": seed, **dict(zip(names, values, strict=True)), "seconds": round(time.perf_counter() - started)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, from 42 (the default seed) on")
    seeds = [42 + index for index in range(parser.parse_args().seeds)]
    warm_start_path()  # so that no run's time has it
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            results.append(run(seed, Path(folder) / str(seed)))
            print(results[-1], flush=True)
        shutil.copy(Path(folder) / str(seeds[0]) / "report.png", ROOT / "docs" / "demo_report.png")
    save_result("quickstart", "cpu", {"target_gain": 0.25}, results)


def render(content: dict) -> Section:
    """Return the section of a result."""
    target = content["settings"]["target_gain"]
    rows = []
    for row in content["results"]:
        gains = [row[f"{kind}_after"] - row[f"{kind}_before"] for kind in ("greedy", "sampled")]
        rows.append(
            [
                str(row["seed"]),
                f"{row['greedy_before']:.3f} to {row['greedy_after']:.3f}",
                f"{row['sampled_before']:.3f} to {row['sampled_after']:.3f}",
                verdict(min(gains) >= target),
                str(row["seconds"]),
            ]
        )
    text = [
        "## The quickstart",
        "`recipes/quickstart.yaml` is what `make demo` runs. The table has exact-match accuracy on held-out problems, "
        "before and after training: greedy, and as the mean of 4 samples. Seconds are those of the whole script. The "
        "warm start is built once and left out. This shows that the trainer works; it does not compare it with GRPO.",
        f"Target: both accuracies up by at least {target}.",
        table(["Seed", "Greedy", "Mean of 4 samples", "Met", "Seconds"], rows),
        provenance(content),
    ]
    return Section("\n\n".join(text))


if __name__ == "__main__":
    main()
