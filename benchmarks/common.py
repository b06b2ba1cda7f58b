"""Shared helpers of the benchmarks: paired ratios, a description of the machine, and result files."""

import ctypes
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
import trl

from bapo_trl.compare.results import Row, read_rows


ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
T = TypeVar("T")
Place = TypeVar("Place", bound=Hashable)


# Measuring


def spread(values: Sequence[float]) -> dict[str, float | int]:
    """Return the median, quartiles and number of values, one value per round."""
    lower_quartile, median, upper_quartile = statistics.quantiles(values, n=4, method="inclusive")
    return {
        "median": round(median, 4),
        "lower_quartile": round(lower_quartile, 4),
        "upper_quartile": round(upper_quartile, 4),
        "rounds": len(values),
    }


def keep_freed_memory() -> None:
    """
    Make glibc use one heap for all threads and keep freed memory, so that page faults do not affect timings.
    """
    mallopt = ctypes.CDLL(None).mallopt
    for option, value in ((-8, 1), (-4, 0), (-1, 2**31 - 1)):  # M_ARENA_MAX, M_MMAP_MAX, M_TRIM_THRESHOLD
        mallopt(option, value)


def in_turns(names: Iterable[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Yield (round, name) pairs, in reverse order in every other round, so that no name is always first."""
    names = list(names)
    for index in range(rounds):
        for name in names if index % 2 == 0 else reversed(names):
            yield index, name


def synchronize(device: str) -> None:
    """Wait for the kernels that run on `device`. Call this before reading a clock."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def time_s(function: Callable[[], object], device: str = "cpu") -> float:
    """Return the seconds of one call."""
    synchronize(device)
    start = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - start


def cpu_s(function: Callable[[], object]) -> float:
    """Return the CPU time of one call, in seconds, of all threads of the process."""
    start = time.process_time()
    function()
    return time.process_time() - start


# Result files


def describe_run(name: str) -> dict:
    """
    Return the command, date, machine and library versions of a benchmark.

    Call this at the end: the load average of the last five minutes shows whether other processes were running.
    """
    return {
        "command": command_line(f"benchmarks.{name}"),
        "date": date.today().isoformat(),
        "machine": {
            "device": "CPU",
            "cpu": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "load_average": round(os.getloadavg()[1], 1),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "trl": trl.__version__,
            "transformers": transformers.__version__,
        },
    }


def command_line(module: str) -> str:
    """Return the command of this process, with paths reduced to file names."""
    arguments = [Path(argument).name if Path(argument).is_absolute() else argument for argument in sys.argv[1:]]
    return " ".join(["python", "-m", module, *arguments])


def save_result(name: str, settings: dict, results: Sequence[dict], **more: object) -> None:
    """Write the result file of a benchmark, `results/NAME.json`, with one line per key and per row."""
    head = {"benchmark": name, **describe_run(name), **more, "settings": settings}
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    rows = ",\n".join(f"    {json.dumps(row)}" for row in results)
    path = RESULTS / f"{name}.json"
    path.write_text("\n".join(["{", *lines, '  "results": [', rows, "  ]", "}\n"]))
    print(f"Written: {path}")


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


# Runs of studies


@cache
def rows(name: str, **sweep: Any) -> tuple[Row, ...]:
    """Return the runs of a study, in one setting if that is given."""
    found = read_rows(RESULTS / f"{name}.json").values()
    return tuple(row for row in found if all(row.sweep.get(key) == value for key, value in sweep.items()))


# Learning rates


def best_rate(finals: Mapping[float, float]) -> float:
    """Return the learning rate with the highest final accuracy; of equal ones, the lower."""
    return min(finals, key=lambda rate: (-finals[rate], rate))


def best_rates(pilot: Iterable[Row], place: Callable[[Row], Place]) -> dict[Place, float]:
    """Return the best learning rate at each place of a pilot's runs; a failed run counts as 0."""
    finals: dict[Place, dict[float, float]] = {}
    for row in pilot:
        finals.setdefault(place(row), {})[row.sweep["learning_rate"]] = row.final or 0.0
    return {name: best_rate(by_rate) for name, by_rate in finals.items()}


# Parts of the pages


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def verdict(is_met: bool) -> str:
    """Return "met" or "missed" for a target."""
    return "yes" if is_met else "**no**"
