"""Puts the replay queue between generation and training: TRL's batch in, a batch of fresh and queued rows out."""

import warnings
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from ..batch.filler_rows import mark_fillers
from ..batch.policy_loss import policy_mask
from ..batch.reward_sums import tied_rows
from ..batch.samples import Rows, batch_to_rows, mask_zero_advantages, rows_to_batch, set_num_items
from ..clip_bounds.reduce import Tally
from ..errors import InputError
from .checkpoint import load_queue, save_queue
from .queue import ReplayBatch, ReplayQueue


REPLAY_METRICS = (
    "replay/size", "replay/fraction", "replay/zero_advantage_filled", "replay/untrained", "replay/used",
    "replay/expired", "replay/overflowed", "replay/reuse_mean", "replay/masked", "replay/bytes",
)  # fmt: skip
"""Metrics of each draw, defined in docs/metrics.md."""


@dataclass
class ReplayMixer:
    """
    The queue of this rank and what it needs to stand between generation and training.

    Each draw makes one gather, whatever the contents of the queues, so that the ranks stay in step.
    """

    queue: ReplayQueue
    _: KW_ONLY
    fraction: float
    replaces_zero_advantage: bool
    updates_per_pass: int
    pad_token_id: int
    pad_to_multiple_of: int | None
    accelerator: Accelerator
    log: Callable[[dict[str, float]], None]
    tell_ties: Callable[[torch.Tensor], torch.Tensor]  # see `reward_sums.tied_rows`
    was_loaded: bool = field(default=False, init=False)  # whether the queue came with a checkpoint
    _latest: Rows | None = field(default=None, init=False)  # of the latest generation

    def observe_rewards(self, rewards_per_func: torch.Tensor) -> None:
        """Take note of the rewards of a generation, of all ranks."""
        self._is_tied = self.tell_ties(rewards_per_func)

    def clear_ties(self, batch: dict[str, torch.Tensor]) -> float:
        """Set the advantages of tied rows to 0; return the share of rows that are tied, over all ranks."""
        here = self._is_tied.view(self.accelerator.num_processes, -1)[self.accelerator.process_index]
        mask_zero_advantages(batch, here)
        return self._is_tied.float().mean().item()

    def draw_first_pass(
        self,
        batch: dict[str, torch.Tensor],
        versions: dict[str, torch.Tensor],
        policy_version: int,
        num_padding: int = 0,
        is_within: bool = False,
    ) -> tuple[dict[str, torch.Tensor], bool]:
        """
        Take in a generation; return the batch to train on, and whether all its rows on all ranks are fresh.

        `versions` are those of TRL's batch, on the CPU. `num_padding` of its rows only keep the shape. `is_within`
        tells whether this is the second half of a generation: a run resumed from within it generates it again. The
        queue of the checkpoint has taken in the first half, and is left as it is.
        """
        self._latest = batch_to_rows(batch, self.pad_token_id, versions)
        queue = ReplayQueue(len(self._latest)) if self.was_loaded and is_within else self.queue
        drawn = queue.draw_first_pass(
            self._latest,
            self.fraction,
            self.replaces_zero_advantage,
            policy_version,
            policy_version + self.updates_per_pass - 1,
            num_padding,
        )
        return self._finish(drawn, policy_version)

    def draw_later_pass(self, policy_version: int) -> tuple[dict[str, torch.Tensor], bool]:
        """Return the batch of a later pass over the generation, and whether all its rows are fresh."""
        drawn = self.queue.draw_later_pass(
            len(self._latest), self._latest, policy_version, policy_version + self.updates_per_pass - 1
        )
        return self._finish(drawn, policy_version)

    def save(self, folder: str | Path) -> None:
        """Write the queue into a checkpoint folder."""
        save_queue(self.queue, folder, self.accelerator.process_index, self.accelerator.num_processes)

    def load(self, folder: str | Path, policy_version: int, oversampling: float = 1.0) -> None:
        """
        Restore the queue from a checkpoint folder. Without one there, it starts empty, with a warning.

        With an `oversampling` (`partial_rollout_oversampling`) above 1, the rows of the run have a version a token.
        """
        is_there = load_queue(self.queue, folder, self.accelerator.process_index, self.accelerator.num_processes)
        newest = self.queue.newest_version
        if newest is not None and newest > policy_version:
            raise InputError(
                f"The replay queue in {folder} holds samples of version {newest}, but that of the checkpoint is "
                f"{policy_version}: set `replay_discard_saved` to start with an empty queue."
            )
        if oversampling > 1 and not all(rows.has_token_versions for rows in self.queue.rows):
            raise InputError(
                f"`partial_rollout_oversampling` is {oversampling}, but the replay queue of the checkpoint {folder} "
                "is of a run without partial rollouts: set it back to 1.0, or set `replay_discard_saved` to start "
                "with an empty queue."
            )
        if not is_there:
            warnings.warn(f"The checkpoint {folder} holds no replay queue: starting with an empty one.")
        self.was_loaded = is_there

    def _finish(self, drawn: ReplayBatch, policy_version: int) -> tuple[dict[str, torch.Tensor], bool]:
        device = self.accelerator.device
        batch = rows_to_batch(drawn.rows, self.pad_token_id, device, self.pad_to_multiple_of)
        evictions = self.queue.evictions
        tally = Tally(
            {
                "tokens": policy_mask(batch).sum(),
                "stale": int((drawn.rows.policy_versions != policy_version).sum()),
                "rows": len(drawn.rows),
                "size": len(self.queue),
                "from_queue": drawn.from_queue,
                "zero_advantage_filled": drawn.zero_advantage_filled,
                "untrained": drawn.untrained,
                "used": evictions.used,
                "expired": evictions.expired,
                "overflowed": evictions.overflowed,
                "uses": drawn.uses,
                "masked": drawn.masked,
                "bytes": self.queue.num_bytes,
            }
        ).over_ranks(self.accelerator.gather, device, torch.int64)
        evictions.used = evictions.expired = evictions.overflowed = 0
        set_num_items(batch, torch.as_tensor(tally.sums["tokens"]))
        total = tally.numbers()
        total["fraction"] = total["from_queue"] / total["rows"]
        total["reuse_mean"] = total["uses"] / max(1, total["rows"] - total["masked"])
        self.log({name: total[name.removeprefix("replay/")] for name in REPLAY_METRICS})
        return mark_fillers(batch, drawn.masked) if total["masked"] else batch, total["stale"] == 0


def make_replay(trainer: Any, log: Callable[[dict[str, float]], None]) -> ReplayMixer:
    """Return the mixer of a run, with an empty queue; refuse a model that takes images."""
    args = trainer.args
    if trainer._is_vlm:
        raise InputError(f"A replay queue keeps text only, but the model is multimodal: set {args.without_replay}.")

    def tell_ties(rewards: torch.Tensor) -> torch.Tensor:
        weights = trainer.reward_weights.to(rewards.device)
        return tied_rows(rewards, weights, trainer.num_generations, args.sums_rewards_first)

    queue = ReplayQueue(
        args.replay_capacity,
        max_staleness=args.replay_max_staleness,
        min_staleness=args.replay_min_staleness,
        max_reuse=args.replay_max_reuse,
    )
    return ReplayMixer(
        queue,
        fraction=args.replay_fraction,
        replaces_zero_advantage=args.replay_zero_advantage,
        updates_per_pass=args.updates_per_pass,
        pad_token_id=trainer._tokenizer.pad_token_id,
        pad_to_multiple_of=args.pad_to_multiple_of,
        accelerator=trainer.accelerator,
        log=log,
        tell_ties=tell_ties,
    )
