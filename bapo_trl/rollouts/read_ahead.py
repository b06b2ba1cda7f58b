"""The batches of a run's data loader, read ahead of the training steps that take them."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch


_END = object()  # of an epoch


class ReadAhead:
    """
    Hands on the batches of one epoch after another, and holds the batches that come next.

    Invariant: batches come in the order of the data loader, and torch's random state is what it is without reading
    ahead. An epoch that is opened early gives back the random numbers that it draws; they are drawn when it begins.

    A batch is that of a micro-batch. TRL repeats the prompts of a rollout batch for each of its `repeats`
    micro-batches: they are held once. The first epoch is number `epoch`, and begins with its batch number `position`.
    `has_skipped` tells whether batches that were held are not trained on, as an epoch was ended before its last one.
    """

    def __init__(self, loader: Any, repeats: int, position: int, epoch: int, num_epochs: int):
        self._loader, self._repeats, self._num_epochs = loader, repeats, num_epochs
        self._epoch = epoch - 1  # the epoch that transformers is in
        self._given: Iterator | None = None  # its iterator
        self._reading: Iterator = iter(())  # what is read: that, or the next epoch's, opened early
        self._is_early, self._draws_seed = False, False
        self._upcoming: deque[Any] = deque()
        self._position = position  # in its epoch, of the first batch not read yet
        self._latest: Any = None
        self._first = 0  # number of the first micro-batch of the current update
        self._taken: list[Any] = []  # its batches
        self.has_skipped = False

    def take(self, epoch: Iterator, first: int, count: int, num_left: int) -> list[Any]:
        """
        Return the next `count` batches of an epoch, or what is left of it, for the micro-batches from `first` on.

        Those of a rollout batch more are held afterwards, or of the `num_left` that the run has left, if these are
        fewer.
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
        """Return the batch of a micro-batch of this update or later; `None` if the run has none."""
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
        # It is read already. accelerate's iterators draw and open nothing before they are asked for a batch
        while self._upcoming.popleft() is not _END:
            self.has_skipped = True
        self._is_early = False
        if self._draws_seed:
            torch.empty((), dtype=torch.int64).random_()  # the seed that torch's loaders draw when they are opened

    def _read(self) -> bool:
        """Read one batch more; return `False` if there is none."""
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
