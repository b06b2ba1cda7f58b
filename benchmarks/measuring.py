"""What the benchmarks share: spread of paired ratios, description of the machine, the result file, a steady heap."""

import ctypes
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import torch
import transformers
import trl


ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # of glibc's malloc.h


def spread(ratios: Sequence[float]) -> dict[str, float | int]:
    """Return median, quartiles and number of the paired ratios of a setting, one ratio a round."""
    lower_quartile, median, upper_quartile = statistics.quantiles(ratios, n=4, method="inclusive")
    return {
        "median": round(median, 4),
        "lower_quartile": round(lower_quartile, 4),
        "upper_quartile": round(upper_quartile, 4),
        "rounds": len(ratios),
    }


def synchronize(device: str):
    """Wait for the kernels that run on `device`, so that a clock read next to it means something."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def keep_freed_memory():
    """Have glibc serve all threads from one heap and never give freed memory back; elsewhere, do nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for option, value in ((M_ARENA_MAX, 1), (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1)):
            mallopt(option, value)


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def describe_machine(device: str) -> dict[str, str | int | float]:
    """
    Return the names and versions that a figure depends on.

    Called at the end of a benchmark, so that the load average of the last five minutes tells of other work beside it.
    """
    on_gpu = torch.device(device).type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else "CPU",
        "cpu": _cpu_name(),
        "cores": num_cores(),
        "load_average": round(os.getloadavg()[1], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "trl": trl.__version__,
        "transformers": transformers.__version__,
    }


def save_result(name: str, device: str, settings: dict, results: list[dict]):
    """
    Write `results/<name>.json`, or `results/<name>_cuda.json` for a GPU.

    Args:
        name (`str`):
            Name of the benchmark, the key of its section in `render_results.py`.
        device (`str`):
            Device that was measured.
        settings (`dict`):
            Sizes and numbers of rounds.
        results (`list[dict]`):
            Rows of the section's table.
    """
    content = {
        "benchmark": name,
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": date.today().isoformat(),
        "machine": describe_machine(device),
        "settings": settings,
        "results": results,
    }
    RESULTS.mkdir(exist_ok=True)
    suffix = "" if torch.device(device).type == "cpu" else f"_{torch.device(device).type}"
    path = RESULTS / f"{name}{suffix}.json"
    rows = ",\n".join("    " + json.dumps(row) for row in content.pop("results"))
    path.write_text(json.dumps(content, indent=2)[:-2] + f',\n  "results": [\n{rows}\n  ]\n}}\n')
    print(f"Written: benchmarks/results/{path.name}")


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
