"""
Filler rows: copies without a token that counts, which give a batch its size where there are too few samples.

TRL gathers values of each row over ranks, so that every micro-batch keeps its fillers. They would change the means
that a loss takes over the rows of a micro-batch, and over the micro-batches of an update. So the loss is scaled, such
that an update has the gradient of its samples alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


# Their means are over the rows of a micro-batch. That of `bnpo` is over its tokens; others divide by the tokens of the
# generation.
_MEANS_OF_ROWS = ("grpo", "sapo", "dr_grpo", "luspo")


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
    return {**batch, "is_filler": torch.arange(num_rows) >= num_rows - num_fillers}  # on the CPU, as the versions


def scale_without_fillers(trainer: Any, window: Sequence[int]) -> LossScale:
    """
    Return the factors at which an update trains as if its fillers were not there, by its rows on all ranks.

    `window` has the positions of its micro-batches in the trainer's buffer. Those of the next generation are taken to
    have no fillers: only the first generation of partial rollouts is short.
    """
    buffer, args = trainer._buffered_inputs, trainer.args
    if buffer is None or "is_filler" not in buffer[window[0]]:
        return LossScale()
    size, length = args.per_device_train_batch_size, args.micro_batches_per_generation
    generated = window[: length - trainer._step % length]
    rows = [int((~buffer[position]["is_filler"]).sum()) for position in generated]
    rows += [size] * (len(window) - len(generated))
    counts = torch.tensor([float(sum(rows)), float(sum(map(bool, rows)))], device=trainer.accelerator.device)
    num_rows, num_filled = trainer.accelerator.reduce(counts, reduction="sum").tolist()
    if not num_rows:
        return LossScale()
    whole = len(window) * trainer.accelerator.num_processes / num_filled
    if trainer.loss_type in _MEANS_OF_ROWS:
        return LossScale(size * num_filled / num_rows, whole)
    return LossScale(1.0 if trainer.loss_type == "bnpo" else 1 / whole, whole)
