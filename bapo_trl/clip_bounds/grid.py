"""The candidate values of both clip bounds, in ratio space (`0.8`, `1.2`), never `1 - epsilon`."""

import math
from dataclasses import dataclass, fields
from functools import lru_cache

import torch

from ..errors import InputError


MOST_POINTS = 2_000
"""Largest number of candidates of a bound. The curves need a table of up to 4 times its square (128 MB)."""


def sum_dtype(device: torch.device | str) -> torch.dtype:
    """Return `torch.float64`, or `torch.float32` on devices that may have no double precision: MPS, XPU, NPU."""
    return torch.float64 if torch.device(device).type in ("cpu", "cuda") else torch.float32


@lru_cache(maxsize=64)
def _grid_axis(start: float, step: float, num_points: int, device: torch.device | str) -> torch.Tensor:
    # Computed on the device, as a copy would synchronize; by index, as repeated addition of 0.05 misses 3.0
    return start + step * torch.arange(num_points, device=device, dtype=sum_dtype(device))


def _num_points(start: float, maximum: float, step: float) -> int:
    return math.floor((maximum - start) / step + 1e-9) + 1  # 0.15 / 0.05 is 2.9999999999999996


@dataclass(frozen=True)
class BoundGrid:
    """
    Candidate values of both clip bounds, in ratio space.

    Each axis holds `start + k * step` for `k = 0 .. floor((max - start) / step)`. An axis may be a single point
    (`start == max`): that bound is then fixed. The fields are those of [`BAPOConfig`] without `ratio_` in front.

    Raises:
        ValueError: If a value is not finite, a start lies above its maximum, a step is not positive or makes more than
            [`MOST_POINTS`] candidates, a lower bound lies outside (0, 1] or an upper bound below 1.

    Example:

    ```python
    >>> grid = BoundGrid(lower_start=0.8, lower_max=0.9, lower_step=0.05, upper_start=1.2, upper_max=1.2)
    >>> grid.lower
    tensor([0.8000, 0.8500, 0.9000], dtype=torch.float64)
    >>> grid.upper
    tensor([1.2000], dtype=torch.float64)

    ```
    """

    lower_start: float = 0.6
    lower_max: float = 0.9
    lower_step: float = 0.02
    upper_start: float = 1.2
    upper_max: float = 3.0
    upper_step: float = 0.05

    def __post_init__(self):
        for side, is_bound, fix in (
            ("lower", lambda ratio: 0 < ratio <= 1, "a ratio in (0, 1], e.g. 0.8"),
            ("upper", lambda ratio: 1 <= ratio < math.inf, "a finite ratio, at least 1, e.g. 1.2"),
        ):
            start, maximum, step = (getattr(self, f"{side}_{part}") for part in ("start", "max", "step"))
            for part, value in (("start", start), ("max", maximum)):
                if not is_bound(value):
                    raise InputError(f"`ratio_{side}_{part}` is {value}: set it to {fix} (not an `epsilon`).")
            if not 0 < step < math.inf:
                raise InputError(f"`ratio_{side}_step` is {step}: set it to a positive step, e.g. 0.05.")
            if start > maximum:
                raise InputError(
                    f"`ratio_{side}_start` is {start}, above `ratio_{side}_max`, which is {maximum}: lower "
                    f"`ratio_{side}_start` or raise `ratio_{side}_max` (equal values fix the bound)."
                )
            if (maximum - start) / step >= MOST_POINTS:
                raise InputError(
                    f"`ratio_{side}_step` is {step}, which makes more than {MOST_POINTS} candidates from "
                    f"`ratio_{side}_start` ({start}) to `ratio_{side}_max` ({maximum}): raise it, e.g. to 0.05."
                )

    @property
    def lower(self) -> torch.Tensor:
        """Candidates of the lower bound, shape `(K_low,)`, float64 on the CPU, ascending."""
        return self.lower_on("cpu").clone()

    @property
    def upper(self) -> torch.Tensor:
        """Candidates of the upper bound, shape `(K_high,)`, float64 on the CPU, ascending."""
        return self.upper_on("cpu").clone()

    @property
    def num_lower(self) -> int:
        """Number of candidates of the lower bound, `K_low`."""
        return _num_points(self.lower_start, self.lower_max, self.lower_step)

    @property
    def num_upper(self) -> int:
        """Number of candidates of the upper bound, `K_high`."""
        return _num_points(self.upper_start, self.upper_max, self.upper_step)

    def lower_on(self, device: torch.device | str) -> torch.Tensor:
        """Return [`BoundGrid.lower`] on `device`, in the widest floating type the device has. Shared: do not write."""
        return _grid_axis(self.lower_start, self.lower_step, self.num_lower, device)

    def upper_on(self, device: torch.device | str) -> torch.Tensor:
        """Return [`BoundGrid.upper`] on `device`, in the widest floating type the device has. Shared: do not write."""
        return _grid_axis(self.upper_start, self.upper_step, self.num_upper, device)

    @property
    def is_fixed(self) -> bool:
        """Whether there is a single pair of bounds, so that nothing is left to search."""
        return self.num_lower == self.num_upper == 1


BOUND_PARTS = tuple(part.name for part in fields(BoundGrid))

SINGLE_POINT = BoundGrid(lower_start=1.0, lower_max=1.0, upper_start=1.0, upper_max=1.0)
"""Grid of a loss without clip bounds: there is nothing to search, and no token is clipped at it."""
