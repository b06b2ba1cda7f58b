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
            f"{folder} holds replay queues of runs with {sorted(sizes)} processes: remove the foreign ones."
        )
    (saved,) = sizes
    paths = [Path(folder) / _NAME.format(rank=index, world=saved) for index in range(saved)]
    if saved == num_processes:
        queue.restore(*_read(paths[rank]))
        return True
    rows, states = [], []
    for path in paths:
        its_rows, state = _read(path)
        rows.extend(zip(its_rows, *state["ledger"].values(), strict=True))
        states.append(state)
    own = rows[rank::num_processes]
    state = {**states[rank % saved], "next_turn": max(state["next_turn"] for state in states)}
    names = state["ledger"]
    state["ledger"] = {name: [entry[1 + index] for entry in own] for index, name in enumerate(names)}
    queue.restore([entry[0] for entry in own], state)
    return True


def _read(path: Path) -> tuple[list[Row], dict]:
    if not path.exists():
        raise ValueError(
            f"The replay queue {path} is missing, while other ranks' are there: the checkpoint is damaged."
        )
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(
                    f"The replay queue {path} has the format {metadata.get('format')!r}, not {FORMAT!r}: it was not "
                    "written by this version of bapo_trl."
                )
            state = json.loads(metadata["state"])
            columns = {}
            for key in {name.rpartition(".")[0] for name in file.keys()}:  # noqa: SIM118
                lengths = file.get_tensor(f"{key}.lengths").tolist()
                parts = file.get_tensor(f"{key}.values").split([abs(length) for length in lengths])
                columns[key] = [
                    part.clone() if length >= 0 else part.reshape(()).clone()
                    for part, length in zip(parts, lengths, strict=True)
                ]
    except (SafetensorError, RuntimeError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"The replay queue {path} is damaged: {error}") from error
    size = len(state["ledger"]["version"])
    if any(len(column) != size for column in columns.values()):
        raise ValueError(
            f"The replay queue {path} is damaged: its tensors and its ledger differ in their number of rows."
        )
    keys = sorted(columns)
    return [{key: columns[key][index] for key in keys} for index in range(size)], state
