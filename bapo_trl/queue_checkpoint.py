"""Keep replay queues in a checkpoint folder: one safetensors file a rank, with JSON in its header. No pickle.

A file is written under a temporary name and renamed: under its final name it is complete. A checksum tells of values
that have changed since.
"""

import json
import os
import re
from pathlib import Path

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .batching import Column, Rows, join
from .replay_queue import ReplayQueue


FORMAT = "bapo_trl replay queue 2"
_NAME = "replay_queue_{rank:05d}_of_{world:05d}.safetensors"
_PATTERN = re.compile(r"replay_queue_(\d{5})_of_(\d{5})\.safetensors")


def save_queue(queue: ReplayQueue, folder: str | Path, rank: int, num_processes: int) -> Path:
    """
    Write the queue of one rank into a checkpoint folder.

    Args:
        queue ([`ReplayQueue`]):
            The queue.
        folder (`str` or `Path`):
            Checkpoint folder; made if it is not there.
        rank (`int`):
            Rank of the queue.
        num_processes (`int`):
            Number of ranks.

    Returns:
        `Path` of the file.
    """
    chunks, state = queue.state()
    tensors = {}
    for number, rows in enumerate(chunks):
        for key, column in rows.columns.items():
            tensors[f"{number}.{key}"] = column.values
            if column.lengths is not None:
                tensors[f"{number}.{key}.lengths"] = torch.tensor(column.lengths)  # a copy: columns share theirs
    metadata = {"format": FORMAT, "state": json.dumps(state), "checksum": _checksum(tensors)}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if rank == 0:  # a run that was resumed from before may have had another number of ranks
        for other in folder.iterdir():
            match = _PATTERN.fullmatch(other.name)
            if match and int(match[2]) != num_processes:
                other.unlink()
    path = folder / _NAME.format(rank=rank, world=num_processes)
    unfinished = path.with_suffix(".unfinished")
    save_file(tensors, unfinished, metadata=metadata)
    with open(unfinished, "rb+") as file:
        os.fsync(file.fileno())  # else the new name could reach the disk before the values
    os.replace(unfinished, path)
    return path


def load_queue(queue: ReplayQueue, folder: str | Path, rank: int, num_processes: int) -> bool:
    """
    Restore the queue of one rank from a checkpoint folder.

    With another number of ranks than at saving, the rows of all ranks are dealt out again: in the order of the ranks,
    within a rank in the order of entry, the i-th row goes to rank i modulo the number of ranks. A rank then goes on
    with the random state of the saved rank of its number, if there is one, and counts the departures of the saved
    ranks `rank`, `rank + num_processes`, ...

    Args:
        queue ([`ReplayQueue`]):
            Queue to fill.
        folder (`str` or `Path`):
            Checkpoint folder.
        rank (`int`):
            Rank of the queue.
        num_processes (`int`):
            Number of ranks now.

    Returns:
        `bool`: Whether the folder holds queues. If not, the queue is left as it is.

    Raises:
        ValueError: If a file is damaged, missing or not ours, naming it.
    """
    found = {path: match for path in Path(folder).iterdir() if (match := _PATTERN.fullmatch(path.name))}
    if not found:
        return False
    sizes = {int(match[2]) for match in found.values()}
    if len(sizes) > 1:
        raise ValueError(
            f"{folder} holds replay queues of runs with {sorted(sizes)} processes: remove the foreign ones, or set "
            "`replay_discard_saved` to start with an empty queue."
        )
    (saved,) = sizes
    paths = [Path(folder) / _NAME.format(rank=index, world=saved) for index in range(saved)]
    if saved == num_processes:
        _restore(queue, *_read(paths[rank]), paths[rank])
        return True
    _restore(queue, *_deal_out([_read(path) for path in paths], rank, num_processes), paths[rank % saved])
    return True


def _deal_out(queues: list[tuple[list[Rows], dict]], rank: int, num_processes: int) -> tuple[list[Rows], dict]:
    """Return what one rank takes over from the queues of another number of ranks."""
    chunks = [rows for its_chunks, _ in queues for rows in its_chunks]
    states = [state for _, state in queues]
    sizes = [len(rows) for rows in chunks]
    chunk = np.repeat(np.arange(len(chunks)), sizes)
    place = np.concatenate([np.empty(0, dtype=np.int64), *map(np.arange, sizes)])
    ledger = {name: np.concatenate([state["ledger"][name] for state in states]) for name in states[0]["ledger"]}
    own = np.arange(len(chunk))[rank::num_processes]
    # In the order of entry again, which is that of the versions: beyond its capacity, a queue lets the first go.
    own = own[np.argsort(ledger["version"][own], kind="stable")]
    rows = [join([(chunks[chunk[index]], [place[index]]) for index in own])] if len(own) else []
    departures = [state["departures"] for state in states[rank::num_processes]]
    return rows, {
        "ledger": {name: values[own].tolist() for name, values in ledger.items()},
        "next_turn": max(state["next_turn"] for state in states),
        "departures": {name: sum(counts[name] for counts in departures) for name in states[0]["departures"]},
        "random": states[rank]["random"] if rank < len(states) else None,
    }


def _restore(queue: ReplayQueue, chunks: list[Rows], state: dict, path: Path) -> None:
    try:
        queue.restore(chunks, state)
    except (LookupError, TypeError, ValueError) as error:
        raise _damaged(path, error) from error


def _read(path: Path) -> tuple[list[Rows], dict]:
    if not path.exists():
        raise ValueError(
            f"The replay queue {path} is missing, while other ranks' are there: the checkpoint is damaged."
        )
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # Copies: the tensors are windows on the file
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise _damaged(path, error) from error
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"The replay queue {path} has the format {metadata.get('format')!r}, not {FORMAT!r}: it was not written "
            "by this version of bapo_trl. Set `replay_discard_saved` to start with an empty queue."
        )
    try:
        if _checksum(tensors) != metadata["checksum"]:
            raise ValueError("its values have changed since it was written")
        state = json.loads(metadata["state"])
        columns: dict[int, dict[str, Column]] = {}
        for name, values in tensors.items():
            number, key, *is_lengths = name.split(".")
            if not is_lengths:
                lengths = tensors.get(f"{name}.lengths")
                columns.setdefault(int(number), {})[key] = Column(values, None if lengths is None else lengths.numpy())
        chunks = [Rows(columns[number]) for number in sorted(columns)]
        sizes = {sum(map(len, chunks)), *map(len, state["ledger"].values())}
        is_complete = {"next_turn", "departures", "random"} <= set(state)
        if not is_complete or set(state["ledger"]) != {"version", "uses", "turn"} or len(sizes) != 1:
            raise ValueError("its values and its ledger do not go together")
    except (LookupError, RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(path, error) from error
    return chunks, state


def _checksum(tensors: dict[str, torch.Tensor]) -> str:
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(
        f"The replay queue {path} is damaged ({error}): set `replay_discard_saved` to start with an empty queue."
    )
