"""Reads batches of a run's data loader before the training steps that use them."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch


_END = object()  # of an epoch


class ReadAhead:
    """
    Return the batches of one epoch after another, and read the next ones in advance.

    Invariant: batches come in the order of the data loader, and torch's random state is the same as without reading
    ahead. If an epoch is opened early, its random numbers are restored, and drawn again when the epoch begins.

    Each batch belongs to a micro-batch. TRL repeats the prompts of a rollout batch for each of its `repeats`
    micro-batches; they are stored once. The first epoch has the number `epoch`, and begins with its batch `position`.
    `has_skipped` says whether batches that were read are not trained on, because an epoch ended early.
    """

    def __init__(self, loader: Any, repeats: int, position: int, epoch: int, num_epochs: int):
        self._loader, self._repeats, self._num_epochs = loader, repeats, num_epochs
        self._epoch = epoch - 1  # the epoch that transformers is in
        self._given: Iterator | None = None  # its iterator
        self._reading: Iterator = iter(())  # the iterator that is read: the same, or the next epoch's, opened early
        self._is_early, self._draws_seed = False, False
        self._upcoming: deque[Any] = deque()
        self._position = position  # position in its epoch of the first batch that is not read yet
        self._latest: Any = None
        self._first = 0  # number of the first micro-batch of the current update
        self._taken: list[Any] = []  # its batches
        self.has_skipped = False

    def take(self, epoch: Iterator, first: int, count: int, num_left: int) -> list[Any]:
        """
        Return the next `count` batches of an epoch, or its remaining ones, for the micro-batches from `first` on.

        The batches of another rollout batch are read ahead, or the `num_left` batches that the run has left, if fewer.
        """
        wanted = count + min(self._repeats, num_left)
        self.has_skipped = False
        if epoch is not self._given:
            self._begin(epoch)
        while sum(batch is not _END for batch in self._upcoming) < wanted and self._read():
            pass
        self._first, self._taken = first, []
        while len(self._taken) < count and self._upcoming and self._upcoming[0] is not _END:
            self._taken.append(self._upcoming.popleft())
        return self._taken

    def at(self, number: int) -> Any | None:
        """Return the batch of a micro-batch in this update or later; `None` if it was not read."""
        batches = [*self._taken, *(batch for batch in self._upcoming if batch is not _END)]
        place = number - self._first
        return batches[place] if place < len(batches) else None

    def _begin(self, epoch: Iterator) -> None:
        if self._given is not None and not self._is_early:
            self._position = 0
        self._given, self._epoch = epoch, self._epoch + 1
        if not self._is_early:
            self.has_skipped = bool(self._upcoming)
            self._upcoming.clear()
            self._reading = epoch
            return
        # The epoch is being read already. accelerate's iterators do nothing until they are asked for a batch
        while self._upcoming.popleft() is not _END:
            self.has_skipped = True
        self._is_early = False
        if self._draws_seed:
            torch.empty((), dtype=torch.int64).random_()  # the seed that torch's loaders draw when they are opened

    def _read(self) -> bool:
        """Read one more batch; return `False` if there is none."""
        batch = next(self._reading, _END)
        if batch is _END:
            if self._is_early or self._epoch + 1 >= self._num_epochs:
                return False
            self._upcoming.append(_END)
            self._position = 0
            batch = self._open_next()
        if batch is _END:
            return False
        if self._position % self._repeats == 0 or self._latest is None:
            self._latest = batch
        self._upcoming.append(self._latest)
        self._position += 1
        return True

    def _open_next(self) -> Any:
        """Open the next epoch, and return its first batch."""
        self._is_early = True
        self._loader.set_epoch(self._epoch + 1)
        before = torch.get_rng_state()
        self._reading = iter(self._loader)
        batch = next(self._reading, _END)
        self._draws_seed = not torch.equal(torch.get_rng_state(), before)
        torch.set_rng_state(before)
        return batch
