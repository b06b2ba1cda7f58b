"""How often a fault is tried."""

import os


TRIES_ALL = os.environ.get("FAULTS") == "all"
# Growth of the CPU time of an update over a run; a tenth of the updates is too few for its slope on a busy machine
CPU_LIMIT = 0.25 if TRIES_ALL else 1.0


def cases(whole: int) -> int:
    """Return how many of `whole` cases to try: all with `FAULTS=all` (`make test-faults`), a tenth otherwise."""
    return whole if TRIES_ALL else max(1, whole // 10)
