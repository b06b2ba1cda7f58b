"""What the benchmarks share: paired ratios, the machine, and result files."""

import ctypes
import json
import os
import platform
import statistics
import sys
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path

import torch
import transformers
import trl


ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


# Measuring


def spread(values: Sequence[float]) -> dict[str, float | int]:
    """Return median, quartiles and number of the values of a setting, one a round."""
    lower_quartile, median, upper_quartile = statistics.quantiles(values, n=4, method="inclusive")
    return {
        "median": round(median, 4),
        "lower_quartile": round(lower_quartile, 4),
        "upper_quartile": round(upper_quartile, 4),
        "rounds": len(values),
    }


def keep_freed_memory() -> None:
    """
    Have glibc serve all threads from one heap and never give freed memory back, so that no page faults are measured.
    """
    mallopt = ctypes.CDLL(None).mallopt
    for option, value in ((-8, 1), (-4, 0), (-1, 2**31 - 1)):  # M_ARENA_MAX, M_MMAP_MAX, M_TRIM_THRESHOLD
        mallopt(option, value)


def synchronize(device: str) -> None:
    """Wait for the kernels that run on `device`, so that a clock read next to it means something."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


# Result files


def describe_run(name: str, device: str) -> dict:
    """
    Return command, date and machine of a benchmark, with the versions that a figure depends on.

    Called at its end, so that the load average of the last five minutes tells of other work beside it.
    """
    on_gpu = torch.device(device).type == "cuda"
    return {
        "command": " ".join(["python", "-m", f"benchmarks.{name}", *map(_without_folder, sys.argv[1:])]),
        "date": date.today().isoformat(),
        "machine": {
            "device": torch.cuda.get_device_name(device) if on_gpu else "CPU",
            "cpu": _cpu_name(),
            "cores": num_cores(),
            "load_average": round(os.getloadavg()[1], 1),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "trl": trl.__version__,
            "transformers": transformers.__version__,
        },
    }


def _without_folder(argument: str) -> str:
    """Return the name of a file that is given by an absolute path, which is one machine's, and all else as it is."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def result_path(name: str, device: str) -> Path:
    """Return the path of a benchmark's result file, which is another one for a GPU."""
    kind = torch.device(device).type
    return RESULTS / f"{name}{'' if kind == 'cpu' else f'_{kind}'}.json"


def save_result(name: str, device: str, settings: dict, results: Sequence[dict], earlier: Sequence[dict] = ()) -> None:
    """
    Write the result file of a benchmark.

    Args:
        name (`str`): Name of its module in `benchmarks`, the key of its section in `pages.py`.
        device (`str`): Device that was measured.
        settings (`dict`): Sizes and numbers of rounds.
        results (sequence of `dict`): Rows, from which the section is rendered.
        earlier (sequence of `dict`, *optional*): What [`describe_run`] said of the rows that were there before, the
            newest first.
    """
    content = {
        "benchmark": name,
        **describe_run(name, device),
        **({"earlier": list(earlier)} if earlier else {}),
        "settings": settings,
        "results": list(results),
    }
    write_result(content, result_path(name, device))


def write_result(content: dict, path: Path) -> None:
    """Write a result file: a line for each key, and for each row of `results`."""
    *head, (last, rows) = content.items()
    if last != "results":
        raise ValueError(f"the last key of a result is 'results', got {last!r}.")
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head]
    rows = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(["{", *lines, '  "results": [', rows, "  ]", "}\n"]))
    print(f"Written: {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


# Parts of the pages


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def verdict(is_met: bool) -> str:
    """Return the word for a target that is met or missed."""
    return "yes" if is_met else "**no**"
