"""Keep replay queues in a checkpoint folder: one safetensors file a rank, with JSON in its header. No pickle.

A checksum over all that a file holds, and over its name, tells of what has changed since it was written.
"""

import json
import re
from pathlib import Path

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .queue import ReplayQueue
from .rows import Column, Rows, Spans, concat_rows


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
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _NAME.format(rank=rank, world=num_processes)
    text = json.dumps(state)
    metadata = {"format": FORMAT, "state": text, "checksum": _checksum(path.name, text, tensors)}
    save_file(tensors, path, metadata=metadata)
    return path


def is_queue_file(name: str) -> bool:
    """Return whether a file of a checkpoint folder, by its name, is the replay queue of a rank."""
    return _PATTERN.fullmatch(name) is not None


def load_queue(queue: ReplayQueue, folder: str | Path, rank: int, num_processes: int) -> bool:
    """
    Restore the queue of one rank from a checkpoint folder.

    With another number of ranks than at saving, the rows of all ranks are dealt out again: in the order of the ranks,
    within a rank in the order of entry, the i-th row goes to rank i modulo the number of ranks. A rank then goes on
    with the random state of the saved rank of its number, if there is one, and counts the evictions of the saved
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
    _restore(queue, *_deal_out(paths, rank, num_processes), paths[rank % saved])
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
        if _checksum(path.name, metadata["state"], tensors) != metadata["checksum"]:
            raise ValueError("what it holds is not what was written under this name")
        state = json.loads(metadata["state"])
        chunks = _chunks(tensors)
        if len({sum(map(len, chunks)), *map(len, state["ledger"].values())}) != 1:
            raise ValueError("its values and its ledger do not go together")
    except (LookupError, RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(path, error) from error
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


def _checksum(name: str, state: str, tensors: dict[str, torch.Tensor]) -> str:
    digest = xxhash.xxh3_128(f"{name} {state}".encode())
    for key in sorted(tensors):
        digest.update(f"{key} {tensors[key].dtype} {tuple(tensors[key].shape)}".encode())
        digest.update(tensors[key].reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(
        f"The replay queue {path} is damaged ({error}): set `replay_discard_saved` to start with an empty queue."
    )
