"""
Write a task of the studies as files for `bapo-trl compare`: its model, training problems and held-out problems.

    python -m benchmarks.make_task running_totals

writes `outputs/tasks/running_totals/` with `model/`, `train.jsonl` and `test.jsonl`.
"""

import argparse
import shutil
from collections.abc import Callable
from dataclasses import replace

from benchmarks.common import ROOT
from benchmarks.long_tailed_sums import load_long_tailed_sums
from benchmarks.rambling_totals import load_rambling_totals
from benchmarks.running_totals import load_running_totals
from benchmarks.warm_start import StudyTask, load_sums, warm_start_path


def load_wide_sums() -> StudyTask:
    """Return the sums with a model whose heads are wide enough for vLLM's attention on CPUs."""
    task = load_sums()
    return replace(task, name="wide_sums", warm_start=replace(task.warm_start, model={"hidden_size": 128}))


def load_wide_long_tailed_sums() -> StudyTask:
    """Return the long-tailed sums with a model for vLLM's attention on CPUs, too."""
    task = load_long_tailed_sums()
    model = {**task.warm_start.model, "hidden_size": 128}
    return replace(task, name="wide_long_tailed_sums", warm_start=replace(task.warm_start, model=model))


TASKS: dict[str, Callable[[], StudyTask]] = {
    "sums": load_sums,
    "wide_sums": load_wide_sums,
    "running_totals": load_running_totals,
    "rambling_totals": load_rambling_totals,
    "long_tailed_sums": load_long_tailed_sums,
    "wide_long_tailed_sums": load_wide_long_tailed_sums,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    task = TASKS[parser.parse_args().task]()
    folder = ROOT / "outputs" / "tasks" / task.name
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(warm_start_path(task=task), folder / "model", dirs_exist_ok=True)
    for name, problems in (("train", task.train_dataset), ("test", task.test_dataset)):
        problems.to_json(folder / f"{name}.jsonl")
    print(f"Written: {folder}")


if __name__ == "__main__":
    main()
