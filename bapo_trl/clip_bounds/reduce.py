"""Named sums and maxima over micro-batches and ranks, packed into one tensor for each transfer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class DistributedSums:
    """
    Named numbers to be summed, and named numbers whose maximum is taken. Each has one element.

    Combine micro-batches with `+` and ranks with `over_ranks`. Only `numbers` synchronizes with the host.
    """

    sums: Mapping[str, torch.Tensor | float]
    maxima: Mapping[str, torch.Tensor | float] = field(default_factory=dict)

    def __add__(self, other: "DistributedSums") -> "DistributedSums":
        as_tensor = torch.as_tensor
        return DistributedSums(
            {name: value + other.sums[name] for name, value in self.sums.items()},
            {name: as_tensor(value).maximum(as_tensor(other.maxima[name])) for name, value in self.maxima.items()},
        )

    def over_ranks(
        self, gather: Callable[[torch.Tensor], torch.Tensor], device: torch.device | str, dtype: torch.dtype
    ) -> "DistributedSums":
        """
        Combine the numbers of all ranks, with one `gather`, which concatenates along the first dimension.

        The numbers are transferred on `device` as `dtype`, which must be able to hold the largest sum.
        """
        values = [*self.sums.values(), *self.maxima.values()]
        packed = torch.stack([torch.as_tensor(value, dtype=dtype, device=device) for value in values])
        ranks = gather(packed.unsqueeze(0))  # (ranks, values)
        count = len(self.sums)
        return DistributedSums(
            dict(zip(self.sums, ranks[:, :count].sum(dim=0), strict=True)),
            dict(zip(self.maxima, ranks[:, count:].amax(dim=0), strict=True)) if self.maxima else {},
        )

    def numbers(self) -> dict[str, float]:
        """Return all numbers by name, read from the device in one transfer; they must have the same type."""
        values = {**self.sums, **self.maxima}
        return dict(zip(values, torch.stack([*map(torch.as_tensor, values.values())]).tolist(), strict=True))
