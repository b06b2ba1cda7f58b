"""
What tests cost in CPU-seconds, with the processes that they start and wait for.

A fixture that tests share counts with the first that asks for it. With the environment variable `CPU_SECONDS`, each
run of pytest adds its costs to that file. `python -m tests.helpers.cpu_seconds FILE` prints those of a file.
"""

import json
import resource
import sys
from pathlib import Path


SHOWN = 10
_forked = [0.0]


def add_forked(seconds: float) -> None:
    """Count a process that is not this one's child: the child's child."""
    _forked[0] += seconds


def used() -> float:
    """Return the CPU-seconds of this process and of its children that have ended, with those that were forked."""
    of_both = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in of_both) + _forked[0]


def add(file: str, costs: dict[str, float]) -> None:
    """Add a run's costs to a file of one JSON object a run."""
    with open(file, "a") as output:
        output.write(json.dumps(costs) + "\n")


def read(file: str) -> dict[str, float]:
    """Return the costs of all runs in a file."""
    runs = [json.loads(line) for line in Path(file).read_text().splitlines()]
    return {name: seconds for costs in runs for name, seconds in costs.items()}


def summary(costs: dict[str, float]) -> str:
    """Return the sum of the costs and the dearest tests, as lines."""
    dearest = sorted(costs.items(), key=lambda item: item[1], reverse=True)[:SHOWN]
    lines = [f"{seconds:7.1f}  {name}" for name, seconds in dearest]
    return "\n".join([f"{sum(costs.values()):7.1f}  in all, of {len(costs)} tests", *lines])


if __name__ == "__main__":
    print(summary(read(sys.argv[1])))
