"""
Filler rows: copies without a token that counts, which give a batch its size where there are too few samples.

They would change the means that a loss takes over the rows of a micro-batch, and over the micro-batches of an update.
So the loss is scaled, such that an update has the gradient of its samples alone. Every micro-batch keeps its fillers,
as TRL gathers values of each row over ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator

from ..losses import Loss


@dataclass(frozen=True)
class LossScale:
    """Factors of the loss of an update: one of the policy's part alone (with the KL term), one of the whole."""

    policy: float = 1.0
    whole: float = 1.0

    def of_whole(self, micro_batch: Mapping[str, Any]) -> float:
        """Return the factor of a micro-batch's loss: 0 if it has fillers alone, whose router would be balanced."""
        is_filler = micro_batch.get("is_filler")
        return 0.0 if is_filler is not None and bool(is_filler.all()) else self.whole


def mark_fillers(batch: Mapping[str, Any], num_fillers: int) -> dict[str, Any]:
    """Mark the last rows of TRL's batch as fillers in `is_filler`, `(B,)`. All ranks make this call, or none."""
    num_rows = len(batch["completion_ids"])
    return {**batch, "is_filler": torch.arange(num_rows) >= num_rows - num_fillers}  # on the CPU: the host reads it


def scale_without_fillers(
    micro_batches: Sequence[Mapping[str, Any]], num_later: int, size: int, loss: Loss, accelerator: Accelerator
) -> LossScale:
    """
    Return the factors at which an update trains as if its fillers were not there, by its rows on all ranks.

    The update has these `micro_batches` of `size` rows, and `num_later` of the next generation, which has no fillers:
    only the first generation of partial rollouts is short.
    """
    if not micro_batches or "is_filler" not in micro_batches[0]:
        return LossScale()
    rows = [int((~micro_batch["is_filler"]).sum()) for micro_batch in micro_batches] + [size] * num_later
    counts = torch.tensor([float(sum(rows)), float(sum(map(bool, rows)))], device=accelerator.device)
    num_rows, num_filled = accelerator.reduce(counts, reduction="sum").tolist()
    if not num_rows:
        return LossScale()
    whole = len(rows) * accelerator.num_processes / num_filled
    if loss.mean_over == "samples":
        return LossScale(size * num_filled / num_rows, whole)
    return LossScale(1.0 if loss.mean_over == "tokens" else 1 / whole, whole)
