"""The stale-sample replay buffer: finished samples of past updates, with what they were sampled with.

One buffer a rank, on the CPU, rows without padding; it owns no model and does no communication. Invariants:

- Every row that enters leaves once: by use (`max_reuse`), by age (`max_staleness`) or by capacity, each counted.
- No row is drawn more than `max_reuse` times, nor for updates at which it would be older than `max_staleness`.
- The same calls on the same contents give the same rows: those trained least often first, and of these the ones that
  have waited longest since they entered or were last drawn.
"""

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..batch.samples import Rows, concat_rows, rows_from_tensors, tensors_of_rows
from ..checkpoints.rank_files import RankFiles


FILES = RankFiles("replay queue", "4", "set `replay_discard_saved` to start with an empty buffer")

LARGEST_WASTE = 0.13
"""Share of a chunk's bytes that may belong to rows that have left, before the others are copied out of it."""

# What the buffer knows of each row; `touched` counts all that enter or are drawn, and a chunk is what entered together
_ENTRY = np.dtype([(name, np.int64) for name in ("version", "uses", "touched", "chunk", "place")])


def smallest_capacity(
    rows: int, drawn_first: int, updates_per_pass: int, num_iterations: int = 1, min_staleness: int = 0
) -> int:
    """
    Compute the smallest capacity with which each draw can find as many rows of `min_staleness` as it takes.

    With `U` updates a pass and `I` passes, rows from `d` generations ago are `d U I + p U` versions old at pass `p`
    (from 0). The buffer must hold those that are too young as well: `d` generations at a later pass, of which the
    second needs most, and one less at the first, which draws before its own generation enters.

    `rows` are those of a generation, and what a later pass draws; the first one draws `drawn_first`.
    """
    versions = updates_per_pass * num_iterations  # of a generation
    first = (max(1, math.ceil(min_staleness / versions)) - 1) * rows + drawn_first
    if num_iterations == 1:
        return first
    return max(first, (math.ceil(max(0, min_staleness - updates_per_pass) / versions) + 1) * rows)


def smallest_max_staleness(updates_per_pass: int, num_iterations: int = 1, min_staleness: int = 0) -> int:
    """
    Compute the smallest limit on the staleness under which the first pass over a generation can draw rows.

    They are `d U I` versions old, see [`smallest_capacity`], and `U - 1` more at the last update of the pass.
    """
    versions = updates_per_pass * num_iterations  # of a generation
    return max(1, math.ceil(min_staleness / versions)) * versions + updates_per_pass - 1


@dataclass(frozen=True)
class ReplayBatch:
    """Rows to train on next."""

    rows: Rows
    from_buffer: int  # those that waited in the buffer
    masked: int  # the last rows, which only keep the shape: copies without a token that counts
    uses: int  # sum over the other rows of the number of times they have been drawn, this time included
    zero_advantage_filled: int = 0  # replayed rows in place of fresh ones without advantage or without a trained token
    untrained: int = 0  # fresh rows without a trained token


class ReplayBuffer:
    """Queue of the rows of one rank. `evictions` counts the rows that have left, by reason."""

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
        self.evictions = {"used": 0, "expired": 0, "overflowed": 0}
        self._entries = np.empty(0, _ENTRY)  # in the order in which the rows entered
        self._chunks: dict[int, Rows] = {}  # by number, with some rows that have left
        self._next_touch = self._next_chunk = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the rows' values take."""
        return sum(int(rows.row_bytes().sum()) for rows in self._chunks.values())

    @property
    def rows(self) -> list[Rows]:
        """All rows in the order of entry, in the chunks that hold them; copied where some have left."""
        places = [self._entries["place"][self._entries["chunk"] == number] for number in self._chunks]
        return [
            rows if len(here) == len(rows) else rows.select(here)
            for rows, here in zip(self._chunks.values(), places, strict=True)
        ]

    def add(self, rows: Rows, uses: Sequence[int] | np.ndarray | int = 0) -> None:
        """
        Let rows in that were drawn `uses` times already, each or all. Beyond `capacity`, the first to enter leave.

        The buffer keeps the rows as they are: they must share no memory with what will change.
        """
        uses = np.broadcast_to(np.asarray(uses, dtype=np.int64), (len(rows),))
        if self.max_reuse is not None and (uses >= self.max_reuse).any():
            stays = np.flatnonzero(uses < self.max_reuse)
            self.evictions["used"] += len(rows) - len(stays)
            rows, uses = rows.select(stays), uses[stays]
        self._append(rows, uses, self._touch(len(rows)))
        self._evict_overflow()

    def expire(self, last_version: int) -> None:
        """Let the rows leave that are older than `max_staleness` at the policy version `last_version`."""
        if self.max_staleness is not None:
            self._evict("expired", last_version - self._entries["version"] > self.max_staleness)

    def draw(
        self, count: int, policy_version: int, last_version: int, fill_with_young: bool = False
    ) -> tuple[list[tuple[Rows, np.ndarray]], np.ndarray]:
        """
        Draw rows, for updates from `policy_version` to `last_version`. With its last use, a row leaves.

        Rows younger than `min_staleness` are drawn where there are too few others, if at all (`fill_with_young`).
        Returns up to `count` rows, as what `concat_rows` takes, and how often each has been drawn, now included.
        """
        self.expire(last_version)
        entries = self._entries
        is_young = policy_version - entries["version"] < self.min_staleness
        candidates = np.lexsort((entries["touched"], entries["uses"], is_young))
        if not fill_with_young:
            candidates = candidates[: np.count_nonzero(~is_young)]
        drawn = candidates[:count]
        entries["uses"][drawn] += 1
        entries["touched"][drawn] = self._touch(len(drawn))
        owners, places, uses = (entries[name][drawn] for name in ("chunk", "place", "uses"))
        starts = np.flatnonzero(np.diff(owners, prepend=-1))  # neighbours from one chunk go together
        runs = np.split(places, starts[1:]) if len(drawn) else []
        parts = [(self._chunks[number], run) for number, run in zip(owners[starts].tolist(), runs, strict=True)]
        self._evict_used()
        return parts, uses

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
        Take in the rows of a generation and give back as many to train on, up to `fraction` of them from the buffer.

        Fresh rows that replayed ones displace stay in the buffer. Rows without a trained token are the first to be
        displaced and never enter it. With `replaces_zero_advantage`, these and rows without advantage give their place
        to replayed rows beyond the fraction, and neither enter. The updates on the batch are from `policy_version` to
        `last_version`. The last `num_padding` rows keep the shape of the batch: nobody sampled them.
        """
        is_trained = fresh.has_trained_token()
        is_useful = is_trained & (fresh.has_advantage() | (not replaces_zero_advantage))
        useful, without = np.flatnonzero(is_useful), np.flatnonzero(~is_useful)
        wanted = round(fraction * len(fresh)) + replaces_zero_advantage * len(without)
        replayed, uses = self.draw(min(wanted, len(fresh)), policy_version, last_version)
        places = len(fresh) - len(uses)
        trained, displaced = useful[:places], useful[places:]
        self.add(fresh.select(np.concatenate([displaced, trained])), uses=[0] * len(displaced) + [1] * len(trained))
        fillers = without[: places - len(trained)]
        masked = max(0, len(fillers) + num_padding - len(without))  # those that keep the shape come last
        return ReplayBatch(
            rows=concat_rows([*replayed, (fresh, np.concatenate([trained, fillers]))]),
            from_buffer=len(uses),
            masked=masked,
            uses=int(uses.sum()) + len(trained) + len(fillers) - masked,
            zero_advantage_filled=min(len(without) - len(fillers), len(uses)),
            untrained=int((~is_trained).sum()) - num_padding,
        )

    def draw_later_pass(self, shape_from: Rows, policy_version: int, last_version: int) -> ReplayBatch:
        """
        Draw as many rows as `shape_from` has from the buffer alone, for a later pass over a generation.

        Where the buffer has too few, masked copies of these rows keep the shape; they train nothing.
        """
        replayed, uses = self.draw(len(shape_from), policy_version, last_version, fill_with_young=True)
        missing = len(shape_from) - len(uses)
        fillers = [(shape_from.masked(), np.arange(missing))] if missing else []
        return ReplayBatch(concat_rows([*replayed, *fillers]), len(uses), masked=missing, uses=int(uses.sum()))

    def state_dict(self) -> dict[str, Any]:
        """Return the rows in the order of entry, and all else that a later run needs."""
        ledger = {name: self._entries[name].tolist() for name in ("uses", "touched")}
        counts = {"next_touch": self._next_touch, "evictions": self.evictions}
        return {**tensors_of_rows(self.rows), "ledger": ledger, **counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what [`ReplayBuffer.state_dict`] returned. Beyond `capacity`, the first rows are evicted."""
        chunks = rows_from_tensors(state)
        uses, touched = (np.array(state["ledger"][name], dtype=np.int64) for name in ("uses", "touched"))
        if not sum(map(len, chunks)) == len(uses) == len(touched):
            raise ValueError("its samples and its ledger do not go together")
        self._entries, self._chunks, start = np.empty(0, _ENTRY), {}, 0
        for rows in chunks:
            end = start + len(rows)
            self._append(rows, uses[start:end], touched[start:end])
            start = end
        self._next_touch = int(state["next_touch"])
        self.evictions = {name: int(state["evictions"][name]) for name in self.evictions}
        self._evict_used()  # the limits may have changed since
        self._evict_overflow()

    def _touch(self, count: int) -> np.ndarray:
        self._next_touch += count
        return np.arange(self._next_touch - count, self._next_touch)

    def _append(self, rows: Rows, uses: np.ndarray, touched: np.ndarray) -> None:
        if not len(rows):
            return
        new = np.empty(len(rows), _ENTRY)
        new["version"], new["uses"], new["touched"] = rows.policy_versions, uses, touched
        new["chunk"], new["place"] = self._next_chunk, np.arange(len(rows))
        self._entries = np.concatenate([self._entries, new])
        self._chunks[self._next_chunk] = rows
        self._next_chunk += 1

    def _evict_used(self) -> None:
        if self.max_reuse is not None:
            self._evict("used", self._entries["uses"] >= self.max_reuse)

    def _evict_overflow(self) -> None:
        self._evict("overflowed", np.arange(len(self)) < len(self) - self.capacity)

    def _evict(self, reason: str, leaves: np.ndarray) -> None:
        self.evictions[reason] += int(leaves.sum())
        if leaves.any():
            self._keep(~leaves)

    def _keep(self, mask: np.ndarray) -> None:
        """Forget all rows but those of `mask`, shape `(len(self),)`, and give their memory back."""
        changed = np.unique(self._entries["chunk"][~mask]).tolist()
        self._entries = self._entries[mask]
        for number in changed:
            is_here = self._entries["chunk"] == number
            rows, places = self._chunks[number], self._entries["place"][is_here]
            row_bytes = rows.row_bytes()
            if not len(places):
                del self._chunks[number]
            elif row_bytes[places].sum() < (1 - LARGEST_WASTE) * row_bytes.sum():
                self._chunks[number] = rows.select(places)
                self._entries["place"][is_here] = np.arange(len(places))


def deal_out(states: Iterable[dict[str, Any]], rank: int, num_ranks: int) -> dict[str, Any]:
    """
    Return what one rank takes over from the buffers of another number of ranks, of which one at a time is read.

    In the order of the ranks, within a rank in the order of entry, the i-th row goes to rank i modulo the number of
    ranks. A rank then counts the evictions of the saved ranks `rank`, `rank + num_ranks`, ...
    """
    buffers: list[ReplayBuffer] = []
    before = 0
    for state in states:
        buffers.append(ReplayBuffer(sys.maxsize))
        buffers[-1].load_state_dict(state)
        places = np.arange(before, before + len(buffers[-1]))
        before += len(places)
        buffers[-1]._keep(places % num_ranks == rank)
    dealt, entries = ReplayBuffer(sys.maxsize), np.concatenate([buffer._entries for buffer in buffers])
    if len(entries):
        # In the order of entry again, which is that of the versions: beyond its capacity, a buffer lets the first go
        order = np.argsort(entries["version"], kind="stable")
        rows = concat_rows([(rows, np.arange(len(rows))) for buffer in buffers for rows in buffer.rows])
        dealt._append(rows.select(order), entries["uses"][order], entries["touched"][order])
    dealt._next_touch = max(buffer._next_touch for buffer in buffers)
    for buffer in buffers[rank::num_ranks]:
        dealt.evictions = {name: count + buffer.evictions[name] for name, count in dealt.evictions.items()}
    return dealt.state_dict()
