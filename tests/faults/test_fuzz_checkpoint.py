"""State files of a checkpoint, damaged at random: a clear error, little memory, and no code of theirs is run."""

import json
import resource
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers import file_damage
from tests.helpers.commands import succeeded
from tests.helpers.fault_counts import cases
from tests.helpers.file_damage import LIMIT_BYTES, RANK_FILES, STATE_FILES
from tests.helpers.forked import run_python
from tests.helpers.toy import toy_trainer


pytestmark = pytest.mark.fuzz


SETTINGS = {
    "search_scope": "carried_over", "replay_fraction": 0.5, "partial_rollout_oversampling": 1.5, "num_iterations": 1,
    "gradient_checkpointing": False, "save_strategy": "steps", "save_steps": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint with all kinds of state, after the first of two generations."""
    folder = tmp_path_factory.mktemp("checkpoint")
    toy_trainer(folder, **SETTINGS, max_steps=2).train()
    assert set(STATE_FILES) <= {path.name for path in (folder / "checkpoint-2").iterdir()}
    return folder / "checkpoint-2"


def test_damaged_files_are_refused_by_name_or_hold_what_was_saved(tmp_path, checkpoint):
    shutil.copytree(checkpoint, tmp_path / "whole")
    count = cases(1000)
    succeeded(run_python(["-m", "tests.helpers.file_damage", tmp_path, count, 0]))
    report = json.loads((tmp_path / "outcomes.json").read_text())
    assert len(report["outcomes"]) == count
    wrong = [outcome for outcome in report["outcomes"] if not _is_right(outcome)]
    assert not wrong, wrong
    assert not (tmp_path / "code_ran").exists()
    assert report["memory_kib"] * 1024 < LIMIT_BYTES / 4
    refused = Counter(outcome["damage"] for outcome in report["outcomes"] if "error" in outcome)
    assert set(refused) == {damage.__name__ for damage in file_damage.DAMAGES}


def _is_right(outcome: dict) -> bool:
    if "error" in outcome:
        folder_or_file = outcome["file"] if outcome["file"] in RANK_FILES else "damaged: "
        return outcome["error"] == "InputError" and folder_or_file in outcome["message"]
    # Of transformers' file the size is known alone
    return outcome["is_same"] or outcome["file"] == "trainer_state.json"


def test_a_file_of_another_kind_is_refused_without_reading_it(tmp_path, checkpoint):
    """A foreign file of 8 GiB, most of them a hole: nothing of it comes into memory."""
    shutil.copytree(checkpoint, tmp_path / "whole")
    size = 8 << 30
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    header = json.dumps({"weight": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    for name in RANK_FILES:
        with open(tmp_path / "whole" / name, "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + size)
        with pytest.raises(ValueError, match=rf"{name} is damaged .its format is None, not 'bapo_trl"):
            file_damage.load(name, Path(tmp_path / "whole"))
        assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < LIMIT_BYTES
