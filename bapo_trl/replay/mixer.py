"""Puts the replay queue between generation and training: TRL's batch in, a batch of fresh and queued rows out."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator

from ..batch.filler_rows import mark_fillers
from ..batch.policy_loss import policy_mask
from ..batch.samples import Rows, batch_to_rows, rows_to_batch, set_num_items
from ..clip_bounds.reduce import DistributedSums
from ..errors import InputError
from .queue import FILES, ReplayBatch, ReplayQueue, deal_out


REPLAY_METRICS = (
    "replay/size", "replay/fraction", "replay/zero_advantage_filled", "replay/untrained", "replay/used",
    "replay/expired", "replay/overflowed", "replay/reuse_mean", "replay/masked", "replay/bytes",
)  # fmt: skip
"""Metrics of each draw, defined in docs/metrics.md."""


class ReplayMixer:
    """
    The queue of this rank, between generation and training. `settings` are a [`~bapo_config.BAPOConfig`].

    Each draw makes one gather, whatever the contents of the queues, so that the ranks stay in step. `metrics` are the
    values of [`REPLAY_METRICS`] of the latest draw, `latest` are the rows of the latest generation.
    """

    def __init__(self, settings: Any, pad_token_id: int, accelerator: Accelerator):
        self.queue = ReplayQueue(
            settings.replay_capacity,
            max_staleness=settings.replay_max_staleness,
            min_staleness=settings.replay_min_staleness,
            max_reuse=settings.replay_max_reuse,
        )
        self.metrics: dict[str, float] = {}
        self.latest: Rows | None = None
        self._settings, self._pad_token_id, self._accelerator = settings, pad_token_id, accelerator
        self._was_loaded = False

    def draw_first_pass(
        self,
        batch: Mapping[str, torch.Tensor],
        versions: Mapping[str, torch.Tensor],
        policy_version: int,
        num_padding: int = 0,
        is_within: bool = False,
    ) -> tuple[dict[str, torch.Tensor], bool]:
        """
        Take in a generation; return the batch to train on, and whether all its rows on all ranks are fresh.

        `versions` are those of TRL's batch, on the CPU. `num_padding` of its rows only keep the shape. `is_within`: a
        run that was resumed within this generation makes it again, which the queue of the checkpoint has taken in.
        """
        self.latest = batch_to_rows(batch, self._pad_token_id, versions)
        queue = ReplayQueue(len(self.latest)) if self._was_loaded and is_within else self.queue
        drawn = queue.draw_first_pass(
            self.latest,
            self._settings.replay_fraction,
            self._settings.replay_zero_advantage,
            policy_version,
            policy_version + self._settings.updates_per_pass - 1,
            num_padding,
        )
        return self._finish(drawn, policy_version)

    def draw_later_pass(self, policy_version: int) -> tuple[dict[str, torch.Tensor], bool]:
        """Return the batch of a later pass over the generation, and whether all its rows are fresh."""
        last_version = policy_version + self._settings.updates_per_pass - 1
        return self._finish(self.queue.draw_later_pass(self.latest, policy_version, last_version), policy_version)

    def save(self, folder: str) -> None:
        """Write the queue into a checkpoint folder."""
        FILES.write(folder, self._accelerator.process_index, self._accelerator.num_processes, self.queue.state_dict())

    def load(self, folder: str) -> None:
        """Restore the queue from a checkpoint folder. Without one there, it starts empty, with a warning."""
        rank, num_ranks = self._accelerator.process_index, self._accelerator.num_processes
        self._was_loaded = FILES.load(folder, rank, num_ranks, self.queue.load_state_dict, deal_out)
        if not self._was_loaded:
            warnings.warn(f"The checkpoint {folder} holds no replay queue: starting with an empty one.")

    def _finish(self, drawn: ReplayBatch, policy_version: int) -> tuple[dict[str, torch.Tensor], bool]:
        device = self._accelerator.device
        batch = rows_to_batch(drawn.rows, self._pad_token_id, device, self._settings.pad_to_multiple_of)
        tally = DistributedSums(
            {
                "tokens": policy_mask(batch).sum(),
                "stale": int((drawn.rows.policy_versions != policy_version).sum()),
                "rows": len(drawn.rows),
                "size": len(self.queue),
                "from_queue": drawn.from_queue,
                "zero_advantage_filled": drawn.zero_advantage_filled,
                "untrained": drawn.untrained,
                **self.queue.evictions,
                "uses": drawn.uses,
                "masked": drawn.masked,
                "bytes": self.queue.num_bytes,
            }
        ).over_ranks(self._accelerator.gather, device, torch.int64)
        self.queue.evictions = dict.fromkeys(self.queue.evictions, 0)
        set_num_items(batch, torch.as_tensor(tally.sums["tokens"]))
        total = tally.numbers()
        total["fraction"] = total["from_queue"] / total["rows"]
        total["reuse_mean"] = total["uses"] / max(1, total["rows"] - total["masked"])
        self.metrics = {name: total[name.removeprefix("replay/")] for name in REPLAY_METRICS}
        return mark_fillers(batch, drawn.masked) if total["masked"] else batch, total["stale"] == 0


def make_mixer(trainer: Any) -> ReplayMixer:
    """Return the mixer of a run, with an empty queue."""
    if trainer._is_vlm:
        raise InputError(
            "A replay queue keeps text only, but the model is multimodal: set `replay_fraction` to 0 and "
            "`replay_zero_advantage` to False."
        )
    return ReplayMixer(trainer.args, trainer._tokenizer.pad_token_id, trainer.accelerator)
