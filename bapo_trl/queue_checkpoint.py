"""Keep replay queues in a checkpoint folder: one safetensors file a rank, with JSON in its header. No pickle.

A file is written under a temporary name and renamed: under its final name it is complete.
"""

import json
import os
import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .batching import Row
from .replay_queue import ReplayQueue


FORMAT = "bapo_trl replay queue 1"
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
    rows, state = queue.state()
    tensors = {}
    for key in rows[0] if rows else ():
        values = [row[key] for row in rows]
        tensors[f"{key}.values"] = torch.cat([value.reshape(-1) for value in values])
        # A single value has no length of its own: -1
        tensors[f"{key}.lengths"] = torch.tensor([len(value) if value.dim() else -1 for value in values])
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if rank == 0:  # a run that was resumed from before may have had another number of ranks
        for other in folder.iterdir():
            match = _PATTERN.fullmatch(other.name)
            if match and int(match[2]) != num_processes:
                other.unlink()
    path = folder / _NAME.format(rank=rank, world=num_processes)
    unfinished = path.with_suffix(".unfinished")
    save_file(tensors, unfinished, metadata={"format": FORMAT, "state": json.dumps(state)})
    os.replace(unfinished, path)
    return path


def load_queue(queue: ReplayQueue, folder: str | Path, rank: int, num_processes: int) -> bool:
    """
    Restore the queue of one rank from a checkpoint folder.

    With another number of ranks than at saving, the rows of all ranks are dealt out again: in the order of the ranks,
    within a rank in the order of entry, the i-th row goes to rank i modulo the number of ranks. What else a queue
    knows (turns, departures, random state) then comes from the rank `rank` modulo the number of files.

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
    rows, states = [], []
    for path in paths:
        its_rows, state = _read(path)
        rows.extend(zip(its_rows, *state["ledger"].values(), strict=True))
        states.append(state)
    # In the order of entry again, which is that of the versions: beyond its capacity, a queue lets the first go.
    own = sorted(rows[rank::num_processes], key=lambda entry: int(entry[0]["policy_version"]))
    state = {**states[rank % saved], "next_turn": max(state["next_turn"] for state in states)}
    names = state["ledger"]
    state["ledger"] = {name: [entry[1 + index] for entry in own] for index, name in enumerate(names)}
    _restore(queue, [entry[0] for entry in own], state, paths[rank % saved])
    return True


def _restore(queue: ReplayQueue, rows: list[Row], state: dict, path: Path) -> None:
    try:
        queue.restore(rows, state)
    except (LookupError, TypeError, ValueError) as error:
        raise _damaged(path, error) from error


def _read(path: Path) -> tuple[list[Row], dict]:
    if not path.exists():
        raise ValueError(
            f"The replay queue {path} is missing, while other ranks' are there: the checkpoint is damaged."
        )
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise _damaged(path, error) from error
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"The replay queue {path} has the format {metadata.get('format')!r}, not {FORMAT!r}: it was not written "
            "by this version of bapo_trl."
        )
    try:
        state = json.loads(metadata["state"])
        keys = sorted({name.rpartition(".")[0] for name in tensors})
        columns = {key: _column(tensors[f"{key}.values"], tensors[f"{key}.lengths"].tolist()) for key in keys}
        sizes = {len(column) for column in (*state["ledger"].values(), *columns.values())}
        if set(state["ledger"]) != {"version", "uses", "turn"} or len(sizes) != 1:
            raise ValueError("its tensors and its ledger do not go together")
    except (LookupError, RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(path, error) from error
    return [{key: columns[key][index] for key in keys} for index in range(*sizes)], state


def _column(values: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    parts = values.split([abs(length) for length in lengths])
    return [
        part.clone() if length >= 0 else part.reshape(()).clone() for part, length in zip(parts, lengths, strict=True)
    ]


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(
        f"The replay queue {path} is damaged ({error}): set `replay_discard_saved` to start with an empty queue."
    )
