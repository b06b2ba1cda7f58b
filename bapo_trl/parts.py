"""The parts of a trainer: one feature each, in one file, with the same few moments of a run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from .batch.injected import InjectedRollouts


@dataclass(frozen=True)
class Clock:
    """Where a run is."""

    version: int = 0  # policy version: the number of optimizer updates
    micro_batch: int = 0  # micro-batches that the run has trained on
    place: int = 0  # of the next micro-batch in its generation
    begins_pass: bool = True  # over the samples of the generation


class Part:
    """
    A feature of a trainer. A subclass overrides the moments that it needs.

    The trainer calls each moment of all its parts in the order of `BAPOTrainer.parts`, the same on all ranks: in every
    moment but `load`, a part may make collectives.
    """

    is_fresh: bool | None = None
    """Whether the current policy sampled the batch of the latest `mix`, on all ranks; `None` if `mix` changed none."""

    def reset(self, run: Any) -> None:
        """Begin a run of a trainer, without anything that an earlier run left."""

    def batches(self, epoch: Iterator, count: int, clock: Clock) -> Iterator:
        """Return an iterator over the data loader's batches of the next update, of `count` micro-batches."""
        return epoch

    def sample(self, rows: list[dict[str, Any]], clock: Clock) -> InjectedRollouts | None:
        """Return completions for a generation's rows of the dataset; `None` to have TRL sample them."""
        return None

    def take_rewards(self, rewards_per_func: torch.Tensor, is_evaluation: bool) -> None:
        """
        Read the rewards of a generation's samples on all ranks, `(N, F)` with a column for each function.

        Those of an evaluation are without the repeats that fill its last batch.
        """

    def check(self, batch: dict[str, Any], rollouts: InjectedRollouts | None) -> Mapping[str, float]:
        """Check a generation in TRL's batch, add to it what is missing, and return metrics."""
        return {}

    def mix(self, batch: dict[str, Any] | None, clock: Clock) -> dict[str, Any] | None:
        """
        Return the batch to train on, in place of the given one.

        `batch` is `None` as a later pass over a generation begins; `None` then keeps the batch of the pass before.
        """
        return batch

    def before_evaluation(self, dataloader: DataLoader) -> None:
        """Prepare for an evaluation, which may send the weights to the sampler."""

    def save(self, folder: str, clock: Clock) -> None:
        """Write the state of this rank into a checkpoint folder."""

    def load(self, folder: str) -> None:
        """Read the state of this rank from a checkpoint folder, without collectives: an error ends all ranks."""

    def load_together(self, folder: str) -> None:
        """Restore state for which the ranks communicate, once all have read theirs."""

    def dispensable(self, file: str) -> bool:
        """Return whether a run can be resumed without this file of a checkpoint."""
        return False
