"""Combines fresh samples from TRL's batch with samples from the replay buffer into a batch to train on."""

import warnings
from typing import Any

import torch

from ..batch.log_values import add_values
from ..batch.policy_loss import policy_mask
from ..batch.reward_sums import zero_advantage_rows
from ..batch.samples import Rows, batch_to_rows, mark_fillers, mask_zero_advantages, rows_to_batch, set_num_items
from ..clip_bounds.reduce import DistributedSums
from ..errors import InputError
from ..parts import Part
from .buffer import FILES, ReplayBatch, ReplayBuffer, deal_out


REPLAY_METRICS = (
    "replay/size", "replay/fraction", "replay/zero_advantage_filled", "replay/untrained", "replay/used",
    "replay/expired", "replay/overflowed", "replay/reuse_mean", "replay/masked", "replay/bytes",
)  # fmt: skip
"""Metrics of each draw, defined in docs/metrics.md."""


class ReplayMixer(Part):
    """
    Mix fresh samples with samples from this rank's replay buffer.

    Each draw makes one gather, whatever the buffers contain, so that the ranks stay in step. `latest` has the samples
    of the latest generation step.
    """

    def reset(self, run):
        if run._is_vlm:
            raise InputError(
                "A replay buffer keeps text only, but the model is multimodal: set `replay_fraction` to 0 and "
                "`replay_zero_advantage` to False."
            )
        self._run, self._settings, self._accelerator = run, run.args, run.accelerator
        self._pad_token_id = run._tokenizer.pad_token_id
        self._sums_rewards_first = run.args.multi_objective_aggregation == "sum_then_normalize"
        self.buffer = ReplayBuffer(
            run.args.replay_capacity,
            max_staleness=run.args.replay_max_staleness,
            min_staleness=run.args.replay_min_staleness,
            max_reuse=run.args.replay_max_reuse,
        )
        self.latest: Rows | None = None
        self._was_loaded = False
        self._has_zero_advantage: torch.Tensor | None = None  # of the generation's samples on all ranks

    def take_rewards(self, rewards_per_func, is_evaluation):
        if self._settings.replay_zero_advantage and not is_evaluation:
            weights, count = self._run.reward_weights.to(rewards_per_func.device), self._run.num_generations
            self._has_zero_advantage = zero_advantage_rows(rewards_per_func, weights, count, self._sums_rewards_first)

    def mix(self, batch, clock):
        """
        Add the samples of a generation step to the buffer; return a batch to train on. In a later pass, only draw.

        A generation step that began before a resume is generated again: the saved buffer contains its samples.
        """
        settings, version = self._settings, clock.version
        last_version = version + settings.updates_per_pass - 1
        if batch is None:
            return self._finish(self.buffer.draw_later_pass(self.latest, version, last_version), version)
        batch = dict(batch)
        num_fillers = int(batch.pop("is_filler", torch.zeros(())).sum())
        if self._has_zero_advantage is not None:
            self._mask_zero_advantages(batch)
        self.latest = batch_to_rows(batch, self._pad_token_id)
        buffer = ReplayBuffer(len(self.latest)) if self._was_loaded and clock.place else self.buffer
        drawn = buffer.draw_first_pass(
            self.latest,
            settings.replay_fraction,
            settings.replay_zero_advantage,
            version,
            last_version,
            num_fillers,
        )
        return self._finish(drawn, version)

    def _mask_zero_advantages(self, batch: dict[str, torch.Tensor]) -> None:
        has_zero: Any = self._has_zero_advantage
        of_ranks = has_zero.view(self._accelerator.num_processes, -1)
        mask_zero_advantages(batch, of_ranks[self._accelerator.process_index])
        if self._sums_rewards_first and self._run.scale_rewards != "batch":  # rounding hides some from TRL
            self._run._metrics["train"]["frac_reward_zero_std"][-1] = has_zero.float().mean().item()

    def save(self, folder, clock):
        FILES.write(folder, self._accelerator.process_index, self._accelerator.num_processes, self.buffer.state_dict())

    def load(self, folder):
        """Restore the buffer from a checkpoint folder. Without one there, it starts empty, with a warning."""
        if self._settings.replay_discard_saved:
            return
        rank, num_ranks = self._accelerator.process_index, self._accelerator.num_processes
        self._was_loaded = FILES.load(folder, rank, num_ranks, self.buffer.load_state_dict, deal_out)
        if not self._was_loaded:
            warnings.warn(f"The checkpoint {folder} has no replay buffer: starting with an empty one.")

    def dispensable(self, file):
        return self._settings.replay_discard_saved and FILES.num_ranks_of(file) is not None

    def _finish(self, drawn: ReplayBatch, policy_version: int) -> dict[str, torch.Tensor]:
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
        values = {name: total[name.removeprefix("replay/")] for name in REPLAY_METRICS}
        add_values(self._run._metrics["train"], values)
        self.is_fresh = total["stale"] == 0
        return mark_fillers(batch, drawn.masked) if total["masked"] else batch
