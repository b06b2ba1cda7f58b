"""
The reports in the documentation: trains the runs that they show (about three minutes on two cores), and draws them.

    python -m benchmarks.report_figures          # writes docs/demo_report.png and docs/report.png
    python -m benchmarks.report_figures FOLDER   # keeps the runs in FOLDER, and trains none that is there

docs/demo_report.png has four panels of the demo, which fit a README; docs/report.png has all panels of two settings,
in two columns for a phone.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bapo_trl.report.figure import PANELS, save_png
from bapo_trl.report.runs import Group, group_runs, read_runs

from .common import ROOT


DEMO_PANELS = ("reward", "accuracy", "bapo/clip_high", "bapo/positive_share")  # by their first line
SHORT = ("--max_steps", "96", "--logging_steps", "8", "--save_steps", "96")
FIXED = (
    "--ratio_lower_start",
    "0.6",
    "--ratio_lower_max",
    "0.6",
    "--ratio_upper_start",
    "1.2",
    "--ratio_upper_max",
    "1.2",
)


def train(folder: Path, *flags: str) -> Path:
    if (folder / "eval_results.json").exists():
        return folder
    command = [sys.executable, "train_bapo.py", "--config", "quickstart", "--output_dir", str(folder), *flags]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    return folder


def draw_demo(run: Path, path: Path) -> None:
    panels = [panel for panel in PANELS if panel.lines[0].metric in DEMO_PANELS]
    save_png([Group("BAPO on sums of two numbers, 8 updates per generation", read_runs([run]))], path, panels)


def main() -> None:
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(*sys.argv[1:2] or [parent])
        draw_demo(train(folder / "demo"), ROOT / "docs" / "demo_report.png")
        runs = [train(folder / "searched" / f"seed{seed}", *SHORT, "--seed", str(seed)) for seed in (0, 1)]
        runs.append(train(folder / "fixed" / "seed0", *SHORT, "--seed", "0", *FIXED))
        save_png(group_runs(read_runs(runs)), ROOT / "docs" / "report.png", columns=2)


if __name__ == "__main__":
    main()
