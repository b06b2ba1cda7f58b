"""Keep replay queues in a checkpoint folder: one file a rank, see `rank_files`."""

from pathlib import Path

import numpy as np
import torch

from ..batch.samples import Column, Rows, Spans, concat_rows
from ..checkpoints.rank_files import SENSELESS, RankFiles
from .queue import ReplayQueue


FILES = RankFiles("replay queue", "2", "set `replay_discard_saved` to start with an empty queue")


def save_queue(queue: ReplayQueue, folder: str | Path, rank: int, num_processes: int) -> Path:
    """Write the queue of one rank into a checkpoint folder, made if it is not there; return the file."""
    chunks, state = queue.state()
    tensors = {}
    for number, rows in enumerate(chunks):
        for key, column in rows.columns.items():
            tensors[f"{number}.{key}"] = column.values
            if column.lengths is not None:
                tensors[f"{number}.{key}.lengths"] = torch.tensor(column.lengths)  # a copy: columns share theirs
    return FILES.write(folder, rank, num_processes, {**tensors, **state})


def is_queue_file(name: str) -> bool:
    """Return whether a file of a checkpoint folder, by its name, is the replay queue of a rank."""
    return FILES.num_ranks_of(name) is not None


def load_queue(queue: ReplayQueue, folder: str | Path, rank: int, num_processes: int) -> bool:
    """
    Restore the queue of one rank from a checkpoint folder; return whether the folder holds queues.

    With another number of ranks than at saving, the rows of all ranks are dealt out again: in the order of the ranks,
    within a rank in the order of entry, the i-th row goes to rank i modulo the number of ranks. A rank then counts the
    evictions of the saved ranks `rank`, `rank + num_processes`, ...
    """
    paths = FILES.find(folder)
    if not paths:
        return False
    path = paths[rank % len(paths)]
    chunks, state = _read(path) if len(paths) == num_processes else _deal_out(paths, rank, num_processes)
    try:
        queue.restore(chunks, state)
    except SENSELESS as error:
        raise FILES.damaged(path, error) from error
    return True


def _deal_out(paths: list[Path], rank: int, num_processes: int) -> tuple[list[Rows], dict]:
    """Return what one rank takes over from the files of another number of ranks, one file in memory at a time."""
    own, ledgers, states, before = [], [], [], 0
    for path in paths:
        chunks, state = _read(path)
        ledger = {name: np.array(values, dtype=np.int64) for name, values in state["ledger"].items()}
        places = np.arange((rank - before) % num_processes, len(ledger["version"]), num_processes)
        before += len(ledger["version"])
        ends = np.cumsum([len(rows) for rows in chunks])
        for rows, end in zip(chunks, ends, strict=True):
            here = places[(places >= end - len(rows)) & (places < end)]
            own.append(rows.select(here - (end - len(rows))))
        ledgers.append({name: values[places] for name, values in ledger.items()})
        states.append(state)
    ledger = {name: np.concatenate([each[name] for each in ledgers]) for name in ledgers[0]}
    # In the order of entry again, which is that of the versions: beyond its capacity, a queue lets the first go.
    order = np.argsort(ledger["version"], kind="stable")
    evictions = [state["departures"] for state in states[rank::num_processes]]
    return [concat_rows([(rows, np.arange(len(rows))) for rows in own]).select(order)] if len(order) else [], {
        "ledger": {name: values[order].tolist() for name, values in ledger.items()},
        "next_turn": max(state["next_turn"] for state in states),
        "departures": {name: sum(counts[name] for counts in evictions) for name in states[0]["departures"]},
    }


def _read(path: Path) -> tuple[list[Rows], dict]:
    state = FILES.read(path)
    try:
        tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        chunks = _chunks(tensors)
        if len({sum(map(len, chunks)), *map(len, state["ledger"].values())}) != 1:
            raise ValueError("its values and its ledger do not go together")
        if min(state["ledger"]["uses"], default=0) < 0:
            raise ValueError("it has samples that were used less than 0 times")
    except SENSELESS as error:
        raise FILES.damaged(path, error) from error
    return chunks, state


def _chunks(tensors: dict[str, torch.Tensor]) -> list[Rows]:
    columns: dict[int, dict[str, Column]] = {}
    for name, values in tensors.items():
        number, key, *is_lengths = name.split(".")
        if is_lengths:
            continue
        chunk = columns.setdefault(int(number), {})
        spans = None
        if f"{name}.lengths" in tensors:
            spans = Spans(tensors[f"{name}.lengths"].numpy())
            for other in chunk.values():  # columns of the same lengths share them
                if other.spans is not None and np.array_equal(other.lengths, spans.lengths):
                    spans = other.spans
        chunk[key] = Column(values, spans)
    return [Rows(columns[number]) for number in sorted(columns)]
