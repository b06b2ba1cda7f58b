"""The stale-sample replay queue: finished samples of past updates, with what they were sampled with.

One queue a rank, on the CPU, rows without padding; it owns no model and does no communication. Invariants:

- Every row that enters leaves once: by use (`max_reuse`), by age (`max_staleness`) or by capacity, each counted.
- No row is drawn more than `max_reuse` times, nor for updates at which it would be older than `max_staleness`.
- The same calls on the same contents give the same rows: those trained least often first, and of these the ones that
  have waited longest since they entered or were last drawn.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..batch.samples import Rows, concat_rows, rows_from_tensors, tensors_of_rows
from .store import RowStore


def smallest_capacity(
    rows: int, drawn_first: int, updates_per_pass: int, num_iterations: int = 1, min_staleness: int = 0
) -> int:
    """
    Compute the smallest capacity with which each draw can find as many rows of `min_staleness` as it takes.

    With `U` updates a pass and `I` passes, generations are `U I` versions apart. At pass `p` of a generation (from 0),
    rows from `d` generations ago are `d U I + p U` versions old: those with `d` at least
    `(min_staleness - p U) / (U I)` have rested. The queue must hold the younger ones too: `d` generations at a later
    pass, one less at the first, which draws before its own generation enters. Of the later passes, the second needs
    most.

    `rows` are those of a generation, of which at most as many enter the queue; `drawn_first` those that the first pass
    over it draws: a later pass draws `rows`.
    """
    versions = updates_per_pass * num_iterations  # of a generation
    first = (max(1, math.ceil(min_staleness / versions)) - 1) * rows + drawn_first
    if num_iterations == 1:
        return first
    return max(first, (math.ceil(max(0, min_staleness - updates_per_pass) / versions) + 1) * rows)


def smallest_max_staleness(updates_per_pass: int, num_iterations: int = 1, min_staleness: int = 0) -> int:
    """
    Compute the smallest limit on the staleness under which the first pass over a generation can draw rows.

    With `U` updates a pass and `I` passes, rows from `d` generations ago are `d U I` versions old when the first pass
    draws them, and `U - 1` more at its last update. The youngest that have rested are those of
    `d = max(1, ceil(min_staleness / (U I)))`.
    """
    versions = updates_per_pass * num_iterations  # of a generation
    return max(1, math.ceil(min_staleness / versions)) * versions + updates_per_pass - 1


@dataclass(frozen=True)
class ReplayBatch:
    """Rows to train on next."""

    rows: Rows
    from_queue: int  # those that waited in the queue
    zero_advantage_filled: int  # of these, those in place of fresh rows without advantage or without a trained token
    untrained: int  # fresh rows without a trained token
    masked: int  # the last rows, which only keep the shape: copies without a token that counts
    uses: int  # sum over the other rows of the number of times they have been drawn, this time included


@dataclass
class Evictions:
    """Rows that have left the queue, by reason."""

    used: int = 0
    expired: int = 0
    overflowed: int = 0


def _no_numbers() -> np.ndarray:
    return np.empty(0, dtype=np.int64)


@dataclass
class _Ledger:
    """What the queue knows of each row, in the order of entry: arrays of one length."""

    version: np.ndarray = field(default_factory=_no_numbers)  # policy that sampled it
    uses: np.ndarray = field(default_factory=_no_numbers)  # number of draws
    last_touched: np.ndarray = field(default_factory=_no_numbers)  # counts all that enter or are drawn

    def keep(self, mask: np.ndarray) -> None:
        self.version, self.uses, self.last_touched = self.version[mask], self.uses[mask], self.last_touched[mask]

    def extend(
        self, version: Sequence[int] | np.ndarray, uses: Sequence[int] | np.ndarray, last_touched: Sequence[int]
    ) -> None:
        self.version = np.concatenate([self.version, np.asarray(version, dtype=np.int64)])
        self.uses = np.concatenate([self.uses, np.asarray(uses, dtype=np.int64)])
        self.last_touched = np.concatenate([self.last_touched, np.asarray(last_touched, dtype=np.int64)])


class ReplayQueue:
    """Queue of the rows of one rank."""

    def __init__(
        self,
        capacity: int,
        max_staleness: int | None = None,
        min_staleness: int = 0,
        max_reuse: int | None = None,
    ):
        self.capacity = capacity
        self.max_staleness = max_staleness
        self.min_staleness = min_staleness
        self.max_reuse = max_reuse
        self.evictions = Evictions()
        self._store = RowStore()
        self._ledger = _Ledger()
        self._next_touch = 0

    def __len__(self) -> int:
        return len(self._ledger.version)

    @property
    def newest_version(self) -> int | None:
        """Policy version of the newest row; `None` without any."""
        return int(self._ledger.version.max()) if len(self) else None

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the rows' values take."""
        return self._store.num_bytes

    def add(self, rows: Rows, uses: Sequence[int] | np.ndarray | int = 0) -> None:
        """
        Let rows in that were drawn `uses` times already, each or all. Beyond `capacity`, the first to enter leave.

        The queue keeps the rows as they are: they must share no memory with what will change.
        """
        uses = np.broadcast_to(np.asarray(uses, dtype=np.int64), (len(rows),))
        if self.max_reuse is not None and (uses >= self.max_reuse).any():
            stays = np.flatnonzero(uses < self.max_reuse)
            self.evictions.used += len(rows) - len(stays)
            rows, uses = rows.select(stays), uses[stays]
        touches = range(self._next_touch, self._next_touch + len(rows))
        self._next_touch += len(rows)
        self._store.append(rows)
        self._ledger.extend(rows.policy_versions, uses, touches)
        self._overflow()

    def expire(self, last_version: int) -> None:
        """Let the rows leave that are older than `max_staleness` at the policy version `last_version`."""
        if self.max_staleness is not None:
            keep = last_version - self._ledger.version <= self.max_staleness
            self.evictions.expired += int((~keep).sum())
            self._keep(keep)

    def draw(
        self, count: int, policy_version: int, last_version: int, fill_with_young: bool = False
    ) -> tuple[list[tuple[Rows, np.ndarray]], np.ndarray]:
        """
        Draw rows, for updates from `policy_version` to `last_version`. With its last use, a row leaves.

        Rows younger than `min_staleness` are drawn where there are too few others, if at all (`fill_with_young`).
        Returns up to `count` rows, fewer where not enough may be drawn, as what [`~rows.concat_rows`] copies them
        from; and how often each has been drawn, this time included.
        """
        self.expire(last_version)
        ledger = self._ledger
        has_rested = policy_version - ledger.version >= self.min_staleness
        candidates = self._in_order(np.flatnonzero(has_rested))
        if fill_with_young:
            candidates = np.concatenate([candidates, self._in_order(np.flatnonzero(~has_rested))])
        drawn = candidates[:count]
        rows = self._store.take(drawn)
        ledger.uses[drawn] += 1
        ledger.last_touched[drawn] = np.arange(self._next_touch, self._next_touch + len(drawn))
        self._next_touch += len(drawn)
        uses = ledger.uses[drawn]
        self._leave_used()
        return rows, uses

    def draw_first_pass(
        self,
        fresh: Rows,
        fraction: float,
        replaces_zero_advantage: bool,
        policy_version: int,
        last_version: int,
        num_padding: int = 0,
    ) -> ReplayBatch:
        """
        Take in the rows of a generation and give back as many to train on, fresh and queued ones.

        Fresh rows that queued ones displace stay in the queue. While the queue cannot fill its share, fresh rows do.
        Rows without a trained token are the first to be displaced and never enter the queue.

        `fraction` is the share of the batch taken from the queue, in [0, 1]. With `replaces_zero_advantage`, fresh
        rows without advantage or without a trained token give their place to queued rows beyond it, and those without
        advantage do not enter the queue either. The updates on the batch are from `policy_version` to `last_version`.
        The last `num_padding` rows, without a trained token, keep the shape of the batch: nobody sampled them.
        """
        is_trained = fresh.has_trained_token()
        is_useful = is_trained & (fresh.has_advantage() | (not replaces_zero_advantage))
        useful, without = np.flatnonzero(is_useful), np.flatnonzero(~is_useful)
        wanted = round(fraction * len(fresh)) + replaces_zero_advantage * len(without)
        queued, uses = self.draw(min(wanted, len(fresh)), policy_version, last_version)
        places = len(fresh) - len(uses)
        trained, displaced = useful[:places], useful[places:]
        self.add(fresh.select(np.concatenate([displaced, trained])), uses=[0] * len(displaced) + [1] * len(trained))
        fillers = without[: places - len(trained)]
        masked = max(0, len(fillers) + num_padding - len(without))  # those that keep the shape come last
        return ReplayBatch(
            rows=concat_rows([*queued, (fresh, np.concatenate([trained, fillers]))]),
            from_queue=len(uses),
            zero_advantage_filled=min(len(without) - len(fillers), len(uses)),
            untrained=int((~is_trained).sum()) - num_padding,
            masked=masked,
            uses=int(uses.sum()) + len(trained) + len(fillers) - masked,
        )

    def draw_later_pass(self, count: int, shape_from: Rows, policy_version: int, last_version: int) -> ReplayBatch:
        """
        Draw a whole batch from the queue, for a later pass over a generation.

        Where the queue has too few, masked copies of the rows of `shape_from`, at least one, keep the shape; they
        train nothing.
        """
        queued, uses = self.draw(count, policy_version, last_version, fill_with_young=True)
        missing = count - len(uses)
        fillers = [(shape_from.masked(), np.arange(missing) % len(shape_from))] if missing else []
        return ReplayBatch(
            rows=concat_rows([*queued, *fillers]),
            from_queue=len(uses),
            zero_advantage_filled=0,
            untrained=0,
            masked=missing,
            uses=int(uses.sum()),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the rows in the order of entry, and all else that a later run needs."""
        ledger = {name: values.tolist() for name, values in vars(self._ledger).items()}
        tensors = tensors_of_rows(self._store.chunks())
        return {**tensors, "ledger": ledger, "next_touch": self._next_touch, "evictions": vars(self.evictions)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what [`ReplayQueue.state_dict`] returned. Beyond `capacity`, the first rows are evicted."""
        chunks, ledger = rows_from_tensors(state), state["ledger"]
        if len({sum(map(len, chunks)), *map(len, ledger.values())}) != 1:
            raise ValueError("its values and its ledger do not go together")
        if min(ledger["uses"], default=0) < 0:
            raise ValueError("it has samples that were used less than 0 times")
        self._store, self._ledger = RowStore(), _Ledger()
        for rows in chunks:
            self._store.append(rows)
        self._ledger.extend(**ledger)
        self._next_touch = state["next_touch"]
        self.evictions = Evictions(**state["evictions"])
        self._leave_used()  # the limits may have changed since
        self._overflow()

    @property
    def rows(self) -> list[Rows]:
        """All rows in the order of entry, in the chunks that hold them."""
        return self._store.chunks()

    def _in_order(self, candidates: np.ndarray) -> np.ndarray:
        ledger = self._ledger
        return candidates[np.lexsort((ledger.last_touched[candidates], ledger.uses[candidates]))]

    def _leave_used(self) -> None:
        if self.max_reuse is not None:
            keep = self._ledger.uses < self.max_reuse
            self.evictions.used += int((~keep).sum())
            self._keep(keep)

    def _overflow(self) -> None:
        excess = max(0, len(self) - self.capacity)
        self.evictions.overflowed += excess
        self._keep(np.arange(len(self)) >= excess)

    def _keep(self, mask: np.ndarray) -> None:
        if not mask.all():
            self._store.keep(mask)
            self._ledger.keep(mask)
