"""State files of a checkpoint, damaged at random: a clear error, little memory, and no code of theirs is run."""

import json
import pickle
import random
import resource
import shutil
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bapo_trl import BAPOConfig
from bapo_trl.checkpoints.curves import FILES as CURVES
from bapo_trl.checkpoints.files import MANIFEST, find_defect
from bapo_trl.clip_bounds.controller import ClipBoundController
from bapo_trl.errors import InputError
from bapo_trl.replay import buffer as buffers
from bapo_trl.rollouts import pool as pools
from tests.helpers.commands import succeeded
from tests.helpers.fault_counts import cases
from tests.helpers.forked import run_function
from tests.helpers.toy import toy_trainer


pytestmark = pytest.mark.fuzz

SETTINGS = {
    "search_scope": "carried_over", "replay_fraction": 0.5, "partial_rollout_oversampling": 1.5, "num_iterations": 1,
    "gradient_checkpointing": False, "save_strategy": "steps", "save_steps": 2, "max_steps": 2,
}  # fmt: skip
LIMIT_BYTES = 256 << 20
RANK_FILES = {files.path("", 0, 1).name: files for files in (buffers.FILES, pools.FILES, CURVES)}
STATE_FILES = (*RANK_FILES, MANIFEST, "trainer_state.json")


class Marks:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def load(name: str, folder: Path) -> Any:
    """Load a state file as a resumed run does; return what can be compared, or `None` if nothing was loaded."""
    if name not in RANK_FILES:
        defect = find_defect(folder)
        if defect is not None:
            raise InputError(f"{folder}: {defect}")
        return json.loads((folder / name).read_text())
    if name.startswith("carried_curves"):
        settings = BAPOConfig("unused", use_cpu=True, bf16=False)
        alone = {"reduce": torch.clone, "gather": torch.clone, "update": lambda: 1}
        part = ClipBoundController(settings, torch.device("cpu"), **alone)
        is_there = (folder / name).exists() and part.load_state_dict(CURVES.read(folder / name))
    else:
        module, part = buffers, buffers.ReplayBuffer(100)
        if name.startswith("rollout_pool"):
            module, part = pools, pools.RolloutPool(3, 7, [1])
        is_there = module.FILES.load(folder, 0, 1, part.load_state_dict, module.deal_out)
    if not is_there:
        return None
    state = part.state_dict().items()
    return str({key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in state})


# Kinds of damage: what a file holds, and where it is, to what it holds then


def cut_off(content: bytes, dice: random.Random, **_) -> bytes:
    return content[: dice.randrange(len(content))]


def flipped(content: bytes, dice: random.Random, **_) -> bytes:
    changed = bytearray(content)
    for _ in range(dice.choice([1, 1, 1, 2, 8, 100])):
        end = dice.choice([16, 400, len(changed)])  # often in the header
        changed[dice.randrange(min(end, len(changed)))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def foreign(content: bytes, dice: random.Random, root: Path, name: str) -> bytes:
    kind = dice.randrange(5)
    if kind == 0:
        return dice.randbytes(dice.choice([0, 1, 8, 100, 5000]))
    if kind == 1:
        return pickle.dumps(Marks(root / "code_ran"))
    if kind == 2:
        return (root / "complete" / dice.choice([other for other in STATE_FILES if other != name])).read_bytes()
    if kind == 3:
        metadata = dice.choice([None, {"format": "pt"}, {"format": "bapo_trl replay queue 1"}])
        save_file({"weight": torch.randn(3), "state": torch.ones(5)}, root / "other.safetensors", metadata)
        return (root / "other.safetensors").read_bytes()
    return RANK_FILES.get(name, CURVES).write(root, 1, 2, {"groups": []}).read_bytes()  # another rank's


def oversized(content: bytes, dice: random.Random, name: str, **_) -> bytes:
    length = dice.choice([2**20, 2**27, 2**31, 2**40, 2**63 - 1, 2**64 - 1])
    tensor = dice.choice(
        [
            {"shape": [length], "dtype": "F32", "data_offsets": [0, 4 * length]},  # more than the file
            {"shape": [length, length], "dtype": "F64", "data_offsets": [0, 8]},  # more values than bytes
            {"shape": [length, 0], "dtype": "U8", "data_offsets": [0, 0]},  # many values of no byte
            None,  # more header than file
            "[" * dice.choice([100, 10_000, 1_000_000]),
        ]
    )
    if tensor is None:
        return struct.pack("<Q", length) + content[8:]
    mark = {"__metadata__": {"format": RANK_FILES.get(name, CURVES).format, "checksum": "0"}}
    names = ["state", "tokens", "0.advantages"]
    header = tensor if isinstance(tensor, str) else json.dumps({**mark, dice.choice(names): tensor})
    return struct.pack("<Q", len(header)) + header.encode() + content[:8]


DAMAGES = (cut_off, flipped, foreign, oversized)


def damage_and_load(folder: str, count: str) -> None:
    """Write what came of each case, and how much more memory the process took at most, to FOLDER/outcomes.json."""
    root, dice, outcomes = Path(folder), random.Random(0), []
    complete, damaged = root / "complete", root / "damaged"
    expected = {name: load(name, complete) for name in STATE_FILES}
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + LIMIT_BYTES, resource.RLIM_INFINITY))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(int(count)):
        name = STATE_FILES[number % len(STATE_FILES)]
        damage = DAMAGES[number // len(STATE_FILES) % len(DAMAGES)]
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(complete, damaged)
        content = (damaged / name).read_bytes()
        (damaged / name).write_bytes(damage(content, dice=dice, root=root, name=name))
        outcome = {"file": name, "damage": damage.__name__, "number": number}
        try:
            outcome["is_same"] = load(name, damaged) == expected[name]
        except Exception as error:
            outcome |= {"error": type(error).__name__, "message": str(error)[:300]}
        outcomes.append(outcome)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    (root / "outcomes.json").write_text(json.dumps({"outcomes": outcomes, "memory_kib": memory}))


def is_right(outcome: dict) -> bool:
    if "error" in outcome:
        folder_or_file = outcome["file"] if outcome["file"] in RANK_FILES else "damaged: "
        return outcome["error"] == "InputError" and folder_or_file in outcome["message"]
    # Of transformers' file the size is known alone
    return outcome["is_same"] or outcome["file"] == "trainer_state.json"


def test_damaged_files_are_rejected_by_name_or_hold_what_was_saved(tmp_path):
    toy_trainer(tmp_path / "run", **SETTINGS).train()  # after the first of two generations, with all kinds of state
    (tmp_path / "run" / "checkpoint-2").rename(tmp_path / "complete")
    count = cases(1000)
    succeeded(run_function(damage_and_load, tmp_path, count))
    report = json.loads((tmp_path / "outcomes.json").read_text())
    assert len(report["outcomes"]) == count
    wrong = [outcome for outcome in report["outcomes"] if not is_right(outcome)]
    assert not wrong, wrong
    assert not (tmp_path / "code_ran").exists()
    assert report["memory_kib"] * 1024 < LIMIT_BYTES / 4
    rejected = Counter(outcome["damage"] for outcome in report["outcomes"] if "error" in outcome)
    assert set(rejected) == {damage.__name__ for damage in DAMAGES}
