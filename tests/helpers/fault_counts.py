"""How often a fault is tried."""

import os


def cases(whole: int) -> int:
    """Return how many of `whole` cases to try: all with `FAULTS=all` (`make test-faults`), a tenth otherwise."""
    return whole if os.environ.get("FAULTS") == "all" else max(1, whole // 10)
