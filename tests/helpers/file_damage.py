"""Damages the state files of a checkpoint and loads them: `python -m tests.helpers.file_damage FOLDER COUNT SEED`.

FOLDER holds a checkpoint in `whole`. Writes to FOLDER/outcomes.json what each case did, and how much memory the
process took at most beyond what it had before. It may take little more: `LIMIT_BYTES`.
"""

import io
import json
import pickle
import random
import resource
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bapo_trl.checkpoints.curves import FILES as CURVES
from bapo_trl.checkpoints.files import MANIFEST, find_defect
from bapo_trl.clip_bounds.carried_curves import CarriedCurves
from bapo_trl.clip_bounds.grid import BoundGrid
from bapo_trl.errors import InputError
from bapo_trl.replay.checkpoint import FILES as QUEUE
from bapo_trl.replay.checkpoint import load_queue
from bapo_trl.replay.queue import ReplayQueue
from bapo_trl.rollouts.checkpoint import FILES as POOL
from bapo_trl.rollouts.checkpoint import deal_out
from bapo_trl.rollouts.pool import PoolCounts, unpack_groups


LIMIT_BYTES = 256 << 20
RANK_FILES = {files.path("", 0, 1).name: files for files in (QUEUE, POOL, CURVES)}
STATE_FILES = (*RANK_FILES, MANIFEST, "trainer_state.json")


class Marks:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def load(name: str, folder: Path) -> Any:
    """Load a state file as a resumed run does; return what can be compared, or `None` if nothing was loaded."""
    if name.startswith("replay_queue"):
        queue = ReplayQueue(100)
        if not load_queue(queue, folder, 0, 1):
            return None
        return _listed(queue.state_dict())
    if name.startswith("rollout_pool"):
        loaded: list = []
        POOL.load(
            folder, 0, 1, lambda state: loaded.extend([unpack_groups(state), PoolCounts(**state["counts"])]), deal_out
        )
        return loaded or None
    if name.startswith("carried_curves"):
        curves = CarriedCurves(BoundGrid(), torch.device("cpu"))
        path = CURVES.path(folder, 0, 1)
        if not path.exists():
            return None
        is_loaded = curves.load_state_dict(CURVES.read(path))
        return {key: str(value) for key, value in curves.state_dict().items()} if is_loaded else None
    defect = find_defect(folder)
    if defect is not None:
        raise InputError(f"{folder}: {defect}")
    return json.loads((folder / name).read_text())


def _listed(state: dict) -> dict:
    return {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


# Kinds of damage: what a file holds, and where it is, to what it holds then


def cut_off(content: bytes, dice: random.Random, **_) -> bytes:
    return content[: dice.randrange(len(content))]


def flipped(content: bytes, dice: random.Random, **_) -> bytes:
    changed = bytearray(content)
    for _ in range(dice.choice([1, 1, 1, 2, 8, 100])):
        end = dice.choice([16, 400, len(changed)])  # often in the header
        changed[dice.randrange(min(end, len(changed)))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def overwritten(content: bytes, dice: random.Random, **_) -> bytes:
    changed = bytearray(content)
    start = dice.randrange(len(changed))
    changed[start : start + 4096] = bytes(len(changed[start : start + 4096]))  # zeros, as a crash leaves them
    return bytes(changed)


def foreign(content: bytes, dice: random.Random, folder: Path, name: str, **_) -> bytes:
    marks = Marks(folder.parent / "code_ran")
    kind = dice.randrange(6)
    if kind == 0:
        return dice.randbytes(dice.choice([0, 1, 8, 100, 5000]))
    if kind == 1:
        return pickle.dumps(marks)
    if kind == 2:
        buffer = io.BytesIO()
        torch.save({"positive": torch.ones(3), "state": marks}, buffer)
        return buffer.getvalue()
    if kind == 3:
        return (folder.parent / "whole" / dice.choice([other for other in STATE_FILES if other != name])).read_bytes()
    if kind == 4:
        path = folder.parent / "other.safetensors"
        metadata = dice.choice([None, {"format": "pt"}, {"format": "bapo_trl replay queue 1"}])
        save_file({"weight": torch.randn(dice.choice([0, 3, 100])), "state": torch.ones(5)}, path, metadata)
        return path.read_bytes()
    files = RANK_FILES.get(name, QUEUE)
    return files.write(folder.parent, 1, 2, {"groups": []}).read_bytes()  # another rank's


def oversized(content: bytes, dice: random.Random, name: str, **_) -> bytes:
    mark = {"__metadata__": {"format": RANK_FILES.get(name, QUEUE).format, "checksum": "0"}}
    length = dice.choice([2**20, 2**27, 2**31, 2**40, 2**63 - 1, 2**64 - 1])
    kind = dice.randrange(5)
    if kind == 0:  # more header than file
        return struct.pack("<Q", length) + content[8:]
    if kind == 1:  # more tensor than file
        shape = {"shape": [length], "dtype": "F32", "data_offsets": [0, 4 * length]}
    elif kind == 2:  # more values than bytes
        shape = {"shape": [length, length], "dtype": "F64", "data_offsets": [0, 8]}
    elif kind == 3:  # many values of no byte
        shape = {"shape": [length, 0], "dtype": "U8", "data_offsets": [0, 0]}
    else:  # brackets in brackets
        header = b"[" * dice.choice([100, 10_000, 1_000_000])
        return struct.pack("<Q", len(header)) + header + content
    header = json.dumps({**mark, dice.choice(["state", "tokens", "0.advantages"]): shape}).encode()
    return struct.pack("<Q", len(header)) + header + content[:8]


DAMAGES = (cut_off, flipped, flipped, overwritten, foreign, oversized)


def main(folder: str, count: str, seed: str) -> None:
    root, dice, outcomes = Path(folder), random.Random(int(seed)), []
    whole = {name: load(name, root / "whole") for name in STATE_FILES}
    damaged = root / "damaged"
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + LIMIT_BYTES, resource.RLIM_INFINITY))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(int(count)):
        name = STATE_FILES[number % len(STATE_FILES)]
        damage = DAMAGES[number // len(STATE_FILES) % len(DAMAGES)]
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(root / "whole", damaged)
        content = (damaged / name).read_bytes()
        (damaged / name).write_bytes(damage(content, dice=dice, folder=damaged, name=name))
        outcome = {"file": name, "damage": damage.__name__, "number": number}
        try:
            loaded = load(name, damaged)
        except Exception as error:
            outcome |= {"error": type(error).__name__, "message": str(error)[:300]}
        else:
            outcome["is_same"] = loaded == whole[name]
        outcomes.append(outcome)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    (root / "outcomes.json").write_text(json.dumps({"outcomes": outcomes, "memory_kib": memory}))


if __name__ == "__main__":
    main(*sys.argv[1:])
