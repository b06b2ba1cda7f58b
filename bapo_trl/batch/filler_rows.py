"""
Filler samples: fully masked copies that fill a batch up to its size when there are too few samples.

Fillers would change the means that a loss takes over the samples of a micro-batch, and over the micro-batches of an
update. The loss is therefore scaled, such that an update has the gradient of its real samples alone. Fillers stay in
their micro-batch, because TRL gathers per-sample values over ranks.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .layout import MicroBatch
from .losses import Loss


def mark_fillers(batch: Mapping[str, Any], num_fillers: int) -> dict[str, Any]:
    """Mark the last samples of TRL's batch as fillers, in `is_filler`, `(B,)`. All ranks make this call, or none."""
    num_rows = len(batch["completion_ids"])
    return {**batch, "is_filler": torch.arange(num_rows) >= num_rows - num_fillers}  # on the CPU: the host reads it


def scale_without_fillers(
    update: Sequence[MicroBatch], num_later: int, size: int, loss: Loss, num_ranks: int
) -> tuple[float, float]:
    """
    Return factors with which the fillers of an update, on all ranks, have no effect: for its policy and KL terms, and
    for its whole loss.

    The update has these micro-batches, of `size` samples in TRL's layout, and `num_later` of the next generation
    step. The latter have no fillers: only the first generation step of partial rollouts is too short.
    """
    count = len(update) + num_later
    num_rows = sum(each.trl_real for each in update) + num_later * size * num_ranks
    num_filled = sum(each.trl_filled for each in update) + num_later * num_ranks
    if not num_rows:
        return 1.0, 1.0
    whole = count * num_ranks / num_filled
    if loss.mean_over == "samples":
        return size * num_filled / num_rows, whole
    return 1.0 if loss.mean_over == "tokens" else 1 / whole, whole
