"""Puts the replay queue between generation and training: TRL's batch in, a batch of fresh and queued rows out."""

from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator

from ..bapo_config import BAPOConfig
from ..policy_tokens import policy_mask
from .checkpoint import load_queue, save_queue
from .queue import ReplayBatch, ReplayQueue
from .rows import Rows, batch_to_rows, rows_to_batch


REPLAY_METRICS = {
    "replay/size": "Samples in the queues of all ranks, after the draw.",
    "replay/fraction": "Share of the batch that was drawn from the queue.",
    "replay/zero_advantage_filled": "Samples without advantage or without a trained token that gave their place to queued "
    "ones.",
    "replay/untrained": "Samples of the generation without a trained token (cut off, under "
    "`mask_truncated_completions`, or written by tools alone), which do not enter the queue; 0 at later passes.",
    "replay/used": "Samples that left the queue since the last draw with their last use.",
    "replay/expired": "Samples that left the queue since the last draw because they were too stale.",
    "replay/overflowed": "Samples that left the queue since the last draw because it was full.",
    "replay/reuse_mean": "Mean number of times that the samples of the batch have been drawn, this time included.",
    "replay/masked": "Rows that keep the shape of the batch and train nothing, where the queues had too few.",
    "replay/bytes": "Bytes of memory that the queues take, of all ranks.",
}
"""Definition of each metric logged at each draw."""


class ReplayMixer:
    """
    The queue of this rank and what it needs to stand between generation and training.

    Each draw makes one gather, whatever the contents of the queues, so that the ranks stay in step.

    Args:
        args ([`BAPOConfig`]):
            Settings of the run.
        pad_token_id (`int`):
            Token that pads the batches.
        accelerator ([`~accelerate.Accelerator`]):
            Accelerator of the run.
        log (`Callable[[str, float], None]`):
            Takes name and value of a metric.
    """

    def __init__(
        self, args: BAPOConfig, pad_token_id: int, accelerator: Accelerator, log: Callable[[str, float], None]
    ):
        self.queue = ReplayQueue(
            args.replay_capacity,
            max_staleness=args.replay_max_staleness,
            min_staleness=args.replay_min_staleness,
            max_reuse=args.replay_max_reuse,
            order=args.replay_order,
            seed=args.seed + accelerator.process_index,
        )
        self._args = args
        self._pad_token_id = pad_token_id
        self._accelerator = accelerator
        self._log = log
        self._latest: Rows | None = None  # of the latest generation

    def draw_first_pass(
        self, batch: dict[str, torch.Tensor], policy_version: int
    ) -> tuple[dict[str, torch.Tensor], bool]:
        """
        Take in a generation; return the batch to train on, and whether all its rows on all ranks are fresh.

        Raises:
            ValueError: If the batch has images, or a key that cannot be cut into rows.
        """
        self._latest = batch_to_rows(batch, self._pad_token_id)
        drawn = self.queue.draw_first_pass(
            self._latest,
            self._args.replay_fraction,
            self._args.replay_zero_advantage,
            policy_version,
            policy_version + self._args.updates_per_pass - 1,
        )
        return self._finish(drawn, policy_version)

    def draw_later_pass(self, policy_version: int) -> tuple[dict[str, torch.Tensor], bool]:
        """Return the batch of a later pass over the generation, and whether all its rows are fresh."""
        drawn = self.queue.draw_later_pass(
            len(self._latest), self._latest, policy_version, policy_version + self._args.updates_per_pass - 1
        )
        return self._finish(drawn, policy_version)

    def save(self, folder: str | Path) -> None:
        """Write the queue into a checkpoint folder."""
        save_queue(self.queue, folder, self._accelerator.process_index, self._accelerator.num_processes)

    def load(self, folder: str | Path) -> bool:
        """Restore the queue from a checkpoint folder; return whether it holds one."""
        return load_queue(self.queue, folder, self._accelerator.process_index, self._accelerator.num_processes)

    def _finish(self, drawn: ReplayBatch, policy_version: int) -> tuple[dict[str, torch.Tensor], bool]:
        batch = rows_to_batch(drawn.rows, self._pad_token_id, self._accelerator.device, self._args.pad_to_multiple_of)
        evictions = self.queue.evictions
        counts = torch.tensor(
            [
                int(policy_mask(batch).sum()),
                int((batch["policy_version"] != policy_version).sum()),
                len(self.queue),
                drawn.from_queue,
                drawn.zero_advantage_filled,
                drawn.untrained,
                evictions.used,
                evictions.expired,
                evictions.overflowed,
                drawn.uses,
                self.queue.num_bytes,
                len(drawn.rows),
                drawn.masked,
            ],
            device=self._accelerator.device,
        )
        evictions.used = evictions.expired = evictions.overflowed = 0
        total = self._accelerator.gather(counts.unsqueeze(0)).sum(dim=0)
        _, stale, size, from_queue, filled, untrained, used, expired, overflowed, uses, num_bytes, rows, masked = (
            total.tolist()
        )
        batch["num_items_in_batch"] = total[0]
        values = (
            size,
            from_queue / rows,
            filled,
            untrained,
            used,
            expired,
            overflowed,
            uses / max(1, rows - masked),
            masked,
            num_bytes,
        )
        for name, value in zip(REPLAY_METRICS, values, strict=True):
            self._log(name, value)
        return batch, stale == 0
