"""Combines fresh samples from TRL's batch with samples from the replay buffer into a batch to train on."""

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
from .buffer import FILES, ReplayBatch, ReplayBuffer, deal_out


REPLAY_METRICS = (
    "replay/size", "replay/fraction", "replay/zero_advantage_filled", "replay/untrained", "replay/used",
    "replay/expired", "replay/overflowed", "replay/reuse_mean", "replay/masked", "replay/bytes",
)  # fmt: skip
"""Metrics of each draw, defined in docs/metrics.md."""


class ReplayMixer:
    """
    Mix fresh samples with samples from this rank's replay buffer. `settings` is a [`~bapo_config.BAPOConfig`].

    Each draw makes one gather, whatever the buffers contain, so that the ranks stay in step. `metrics` has the values
    of [`REPLAY_METRICS`] for the latest draw, `latest` the samples of the latest generation step.
    """

    def __init__(self, settings: Any, pad_token_id: int, accelerator: Accelerator):
        self.buffer = ReplayBuffer(
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
        Add the samples of a generation step; return the batch to train on, and whether it is fresh on all ranks.

        `versions` are the policy versions of TRL's batch, on the CPU. `num_padding` of its samples are fillers. With
        `is_within`, the batch regenerates a step that began before a resume: the saved buffer contains its samples.
        """
        self.latest = batch_to_rows(batch, self._pad_token_id, versions)
        buffer = ReplayBuffer(len(self.latest)) if self._was_loaded and is_within else self.buffer
        drawn = buffer.draw_first_pass(
            self.latest,
            self._settings.replay_fraction,
            self._settings.replay_zero_advantage,
            policy_version,
            policy_version + self._settings.updates_per_pass - 1,
            num_padding,
        )
        return self._finish(drawn, policy_version)

    def draw_later_pass(self, policy_version: int) -> tuple[dict[str, torch.Tensor], bool]:
        """Return the batch of a later pass over the generation step, and whether it is fresh on all ranks."""
        last_version = policy_version + self._settings.updates_per_pass - 1
        return self._finish(self.buffer.draw_later_pass(self.latest, policy_version, last_version), policy_version)

    def save(self, folder: str) -> None:
        """Write the buffer into a checkpoint folder."""
        FILES.write(folder, self._accelerator.process_index, self._accelerator.num_processes, self.buffer.state_dict())

    def load(self, folder: str) -> None:
        """Restore the buffer from a checkpoint folder. Without one there, it starts empty, with a warning."""
        rank, num_ranks = self._accelerator.process_index, self._accelerator.num_processes
        self._was_loaded = FILES.load(folder, rank, num_ranks, self.buffer.load_state_dict, deal_out)
        if not self._was_loaded:
            warnings.warn(f"The checkpoint {folder} has no replay buffer: starting with an empty one.")

    def _finish(self, drawn: ReplayBatch, policy_version: int) -> tuple[dict[str, torch.Tensor], bool]:
        device = self._accelerator.device
        batch = rows_to_batch(drawn.rows, self._pad_token_id, device, self._settings.pad_to_multiple_of)
        sums = DistributedSums(
            {
                "tokens": policy_mask(batch).sum(),
                "stale": int((drawn.rows.policy_versions != policy_version).sum()),
                "rows": len(drawn.rows),
                "size": len(self.buffer),
                "from_buffer": drawn.from_buffer,
                "zero_advantage_filled": drawn.zero_advantage_filled,
                "untrained": drawn.untrained,
                **self.buffer.evictions,
                "uses": drawn.uses,
                "masked": drawn.masked,
                "bytes": self.buffer.num_bytes,
            }
        ).over_ranks(self._accelerator.gather, device, torch.int64)
        self.buffer.evictions = dict.fromkeys(self.buffer.evictions, 0)
        set_num_items(batch, torch.as_tensor(sums.sums["tokens"]))
        total = sums.numbers()
        total["fraction"] = total["from_buffer"] / total["rows"]
        total["reuse_mean"] = total["uses"] / max(1, total["rows"] - total["masked"])
        self.metrics = {name: total[name.removeprefix("replay/")] for name in REPLAY_METRICS}
        return mark_fillers(batch, drawn.masked) if total["masked"] else batch, total["stale"] == 0


def make_mixer(trainer: Any) -> ReplayMixer:
    """Return the mixer of a run, with an empty buffer."""
    if trainer._is_vlm:
        raise InputError(
            "A replay buffer keeps text only, but the model is multimodal: set `replay_fraction` to 0 and "
            "`replay_zero_advantage` to False."
        )
    return ReplayMixer(trainer.args, trainer._tokenizer.pad_token_id, trainer.accelerator)
