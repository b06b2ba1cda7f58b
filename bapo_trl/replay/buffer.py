"""The replay buffer: samples of past generation steps, with the log-probabilities they were sampled with.

Each rank has one buffer, on the CPU, with samples without padding. It owns no model and does no communication.
Invariants:

- Each sample is evicted once: after `max_reuse` uses, beyond `max_staleness` or beyond `capacity`. Each is counted.
- No sample is drawn more than `max_reuse` times, nor for an update at which it would exceed `max_staleness`.
- Draws are deterministic: samples with the fewest uses come first, and among them the least recently added or drawn.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..batch.samples import Rows, concat_rows, rows_from_tensors, tensors_of_rows
from ..checkpoints.rank_files import RankFiles


FILES = RankFiles("replay queue", "4", "set `replay_discard_saved` to start with an empty buffer")

LARGEST_WASTE = 0.13
"""Fraction of a chunk's bytes that may belong to evicted samples, before the remaining samples are copied."""

# The record of each sample; `touched` numbers all additions and draws, and a chunk has the samples added together
_ENTRY = np.dtype([(name, np.int64) for name in ("version", "uses", "touched", "chunk", "place")])


@dataclass(frozen=True)
class ReplayBatch:
    """Samples to train on next."""

    rows: Rows
    from_buffer: int  # number of samples from the buffer
    masked: int  # number of fillers at the end: fully masked copies
    uses: int  # sum over the other samples of the number of times they have been drawn, this time included
    zero_advantage_filled: int = 0  # replayed samples that replace fresh ones without advantage or trained token
    untrained: int = 0  # fresh samples without a trained token


class ReplayBuffer:
    """Replay buffer of one rank. `evictions` counts the evicted samples by reason."""

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
        self._entries = np.empty(0, _ENTRY)  # in the order in which samples were added
        self._chunks: dict[int, Rows] = {}  # by number, including some evicted samples
        self._next_touch = self._next_chunk = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the samples' values take."""
        return sum(int(rows.row_bytes().sum()) for rows in self._chunks.values())

    @property
    def rows(self) -> list[Rows]:
        """All samples in the order they were added, by chunk; copies where some of a chunk were evicted."""
        places = [self._entries["place"][self._entries["chunk"] == number] for number in self._chunks]
        return [
            rows if len(here) == len(rows) else rows.select(here)
            for rows, here in zip(self._chunks.values(), places, strict=True)
        ]

    def add(self, rows: Rows, uses: Sequence[int] | np.ndarray | int = 0) -> None:
        """
        Add samples that were already drawn `uses` times, per sample or all. Beyond `capacity`, the oldest are evicted.

        The buffer does not copy the samples: they must not share memory with tensors that will change.
        """
        uses = np.broadcast_to(np.asarray(uses, dtype=np.int64), (len(rows),))
        if self.max_reuse is not None and (uses >= self.max_reuse).any():
            stays = np.flatnonzero(uses < self.max_reuse)
            self.evictions["used"] += len(rows) - len(stays)
            rows, uses = rows.select(stays), uses[stays]
        self._append(rows, uses, self._touch(len(rows)))
        self._evict_overflow()

    def draw(
        self, count: int, policy_version: int, last_version: int, fill_with_young: bool = False
    ) -> tuple[list[tuple[Rows, np.ndarray]], np.ndarray]:
        """
        Draw samples for the updates from `policy_version` to `last_version`; evict those too stale or used up by then.

        Samples below `min_staleness` are drawn only with `fill_with_young`, and if there are too few others. Returns
        up to `count` samples, as arguments of `concat_rows`, and how often each was drawn, including this draw.
        """
        if self.max_staleness is not None:
            self._evict("expired", last_version - self._entries["version"] > self.max_staleness)
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
        Add the samples of a generation step; return as many to train on, up to `fraction` of them from the buffer.

        Fresh samples that are replaced by replayed ones stay in the buffer. Samples without a trained token are
        replaced first and never added to the buffer. With `replaces_zero_advantage`, they and zero-advantage samples
        are replaced beyond the fraction, and neither are added. The updates on the batch are from `policy_version` to
        `last_version`. The last `num_padding` samples are fillers.
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
        masked = max(0, len(fillers) + num_padding - len(without))  # fillers come last
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
        Draw as many samples as `shape_from` has, for a later pass over a generation step, all from the buffer.

        If the buffer has too few, fully masked copies of samples of `shape_from` fill the batch.
        """
        replayed, uses = self.draw(len(shape_from), policy_version, last_version, fill_with_young=True)
        missing = len(shape_from) - len(uses)
        fillers = [(shape_from.masked(), np.arange(missing))] if missing else []
        return ReplayBatch(concat_rows([*replayed, *fillers]), len(uses), masked=missing, uses=int(uses.sum()))

    def state_dict(self) -> dict[str, Any]:
        """Return the samples in the order they were added, and everything else that a resumed run needs."""
        ledger = {name: self._entries[name].tolist() for name in ("uses", "touched")}
        counts = {"next_touch": self._next_touch, "evictions": self.evictions}
        return {**tensors_of_rows(self.rows), "ledger": ledger, **counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of [`ReplayBuffer.state_dict`]. Beyond `capacity`, the oldest samples are evicted."""
        chunks = rows_from_tensors(state)
        uses, touched = (np.array(state["ledger"][name], dtype=np.int64) for name in ("uses", "touched"))
        if not sum(map(len, chunks)) == len(uses) == len(touched):
            raise ValueError("its samples and its ledger differ in length")
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

    def _evict(self, reason: str, mask: np.ndarray) -> None:
        self.evictions[reason] += int(mask.sum())
        if mask.any():
            self._keep(~mask)

    def _keep(self, mask: np.ndarray) -> None:
        """Remove all samples but those of `mask`, shape `(len(self),)`, and free their memory."""
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
    Return one rank's part of the buffers that another number of ranks saved; one buffer at a time is read.

    The samples are ordered by saved rank, then by when they were added. The i-th sample goes to rank i modulo the
    number of ranks. A rank takes over the eviction counts of the saved ranks `rank`, `rank + num_ranks`, ...
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
        # Sorted by policy version, the order in which samples are added: a full buffer evicts the first
        order = np.argsort(entries["version"], kind="stable")
        rows = concat_rows([(rows, np.arange(len(rows))) for buffer in buffers for rows in buffer.rows])
        dealt._append(rows.select(order), entries["uses"][order], entries["touched"][order])
    dealt._next_touch = max(buffer._next_touch for buffer in buffers)
    for buffer in buffers[rank::num_ranks]:
        dealt.evictions = {name: count + buffer.evictions[name] for name, count in dealt.evictions.items()}
    return dealt.state_dict()
