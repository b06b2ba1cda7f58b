"""Holds rows in the order of entry, in the chunks in which they came, and gives back the memory of those that left."""

import numpy as np

from ..batch.samples import Rows


LARGEST_WASTE = 0.13
"""Share of a chunk's bytes that may belong to rows that have left, before the others are copied out of it."""


class _Chunk:
    """Rows that entered together, and which of them are still there."""

    def __init__(self, rows: Rows):
        self.rows = rows
        self.places = np.arange(len(rows))
        self._row_bytes = rows.row_bytes()
        self.num_bytes = int(self._row_bytes.sum())

    def keep(self, mask: np.ndarray) -> "_Chunk":
        self.places = self.places[mask]
        if self._row_bytes[self.places].sum() < (1 - LARGEST_WASTE) * self.num_bytes:
            return _Chunk(self.rows.select(self.places))
        return self


class RowStore:
    """Rows by position: 0 is the one that entered first of those still there."""

    def __init__(self):
        self._chunks: list[_Chunk] = []

    def __len__(self) -> int:
        return sum(len(chunk.places) for chunk in self._chunks)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the values take."""
        return sum(chunk.num_bytes for chunk in self._chunks)

    def append(self, rows: Rows) -> None:
        """Add rows at the end."""
        if len(rows):
            self._chunks.append(_Chunk(rows))

    def keep(self, mask: np.ndarray) -> None:
        """Let go of all rows but those of `mask`, shape `(len(self),)`."""
        parts = np.split(mask, self._ends()[:-1]) if self._chunks else []
        changed = [chunk if part.all() else chunk.keep(part) for chunk, part in zip(self._chunks, parts, strict=True)]
        self._chunks = [chunk for chunk in changed if len(chunk.places)]

    def take(self, positions: np.ndarray) -> list[tuple[Rows, np.ndarray]]:
        """Return the rows at `positions`, in their order, as what [`~rows.join`] copies them from."""
        ends = self._ends()
        owners = np.searchsorted(ends, positions, side="right")
        # Neighbours from one chunk go together
        starts = np.flatnonzero(np.diff(owners, prepend=-1))
        taken = []
        for number, run in zip(owners[starts], np.split(positions, starts[1:]), strict=False):  # none for no positions
            chunk = self._chunks[number]
            taken.append((chunk.rows, chunk.places[run - (ends[number] - len(chunk.places))]))
        return taken

    def chunks(self) -> list[Rows]:
        """Return all rows, in the order of entry, in the chunks that hold them; copied where some have left."""
        return [
            chunk.rows if len(chunk.places) == len(chunk.rows) else chunk.rows.select(chunk.places)
            for chunk in self._chunks
        ]

    def _ends(self) -> np.ndarray:
        return np.cumsum([len(chunk.places) for chunk in self._chunks])
