"""The replay buffer of each rank in a checkpoint folder: one file a rank, see `rank_files`."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ..batch.samples import concat_rows, rows_from_tensors, tensors_of_rows
from ..checkpoints.rank_files import RankFiles
from .queue import ReplayQueue


FILES = RankFiles("replay queue", "3", "set `replay_discard_saved` to start with an empty queue")


def save_queue(queue: ReplayQueue, folder: str | Path, rank: int, num_processes: int) -> Path:
    """Write the queue of one rank into a checkpoint folder, made if it is not there; return the file."""
    return FILES.write(folder, rank, num_processes, queue.state_dict())


def is_queue_file(name: str) -> bool:
    """Return whether a file of a checkpoint folder, by its name, is the replay queue of a rank."""
    return FILES.num_ranks_of(name) is not None


def load_queue(queue: ReplayQueue, folder: str | Path, rank: int, num_processes: int) -> bool:
    """
    Restore the queue of one rank from a checkpoint folder; return whether the folder holds queues.

    With another number of ranks than at saving, the rows of all ranks are dealt out again, see [`deal_out`].
    """
    return FILES.load(folder, rank, num_processes, queue.load_state_dict, deal_out)


def deal_out(states: Iterable[dict[str, Any]], rank: int, num_ranks: int) -> dict[str, Any]:
    """
    Return what one rank takes over from the queues of another number of ranks, of which one at a time is read.

    In the order of the ranks, within a rank in the order of entry, the i-th row goes to rank i modulo the number of
    ranks. A rank then counts the evictions of the saved ranks `rank`, `rank + num_ranks`, ...
    """
    own, ledgers, touches, evictions, before = [], [], [], [], 0
    for state in states:
        chunks = rows_from_tensors(state)
        ledger = {name: np.array(values, dtype=np.int64) for name, values in state["ledger"].items()}
        places = np.arange((rank - before) % num_ranks, len(ledger["version"]), num_ranks)
        before += len(ledger["version"])
        ends = np.cumsum([len(rows) for rows in chunks])
        for rows, end in zip(chunks, ends, strict=True):
            here = places[(places >= end - len(rows)) & (places < end)]
            own.append(rows.select(here - (end - len(rows))))
        ledgers.append({name: values[places] for name, values in ledger.items()})
        touches.append(state["next_touch"])
        evictions.append(state["evictions"])
    ledger = {name: np.concatenate([each[name] for each in ledgers]) for name in ledgers[0]}
    # In the order of entry again, which is that of the versions: beyond its capacity, a queue lets the first go.
    order = np.argsort(ledger["version"], kind="stable")
    dealt = [concat_rows([(rows, np.arange(len(rows))) for rows in own]).select(order)] if len(order) else []
    return {
        **tensors_of_rows(dealt),
        "ledger": {name: values[order].tolist() for name, values in ledger.items()},
        "next_touch": max(touches),
        "evictions": {name: sum(counts[name] for counts in evictions[rank::num_ranks]) for name in evictions[0]},
    }
