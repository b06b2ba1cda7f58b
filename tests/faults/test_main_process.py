"""An error that only the main process runs into ends the other ranks with it, which would wait for it."""

import json
import re

import pytest

from tests.helpers.commands import ROOT, succeeded
from tests.helpers.forked import run_python


NO_ROOM = r"OSError: (On rank 0: )?.*No space left on device"
RAISED = {
    # On rank 0, on rank 1
    "sampler window": (r"KeyError: 'model_config'", r"RuntimeError: On rank 0: 'model_config'"),
    "fixed sequence": (r"KeyError: 'model_config'", r"RuntimeError: On rank 0: 'model_config'"),
    "fixed tokens": (r"Exception: Request failed: 404", r"RuntimeError: On rank 0: Request failed: 404"),
    "completions that are a folder": (r"IsADirectoryError: ", r"OSError: On rank 0: .*Is a directory"),
    "completions on a full disk": (NO_ROOM, NO_ROOM),
    # It alone reads all prompts
    "prompts": (r"InputError: 1 of the 20 prompts", r"InputError: On rank 0: 1 of the 20 prompts"),
    "earlier run": (NO_ROOM, NO_ROOM),
    "model on a full disk": (NO_ROOM, NO_ROOM),
    "callback in a save": (r"KeyError: 'mine'", r"RuntimeError: On rank 0: 'mine'"),
}


@pytest.mark.processes
def test_an_error_of_the_main_process_alone_ends_both_ranks(folder):
    rows = [{"prompt": "" if number == 7 else f"{number}+1="} for number in range(20)]
    (folder / "empty.jsonl").write_text("\n".join(map(json.dumps, rows)))
    worker = ["-m", "tests.helpers.main_process_worker", folder]
    succeeded(run_python(worker, ranks=2, cwd=folder, timeout_s=150, PYTHONPATH=str(ROOT)))
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0].pop("result") == ranks[1].pop("result") == ["of", "main"]
    assert ranks[0].keys() == ranks[1].keys() == RAISED.keys()
    for name, messages in RAISED.items():
        for found, message in zip(ranks, messages, strict=True):
            assert re.match(message, found[name]), (name, found[name])
    for found in ranks:  # and says how to continue, without a word on the disk
        note = found["callback in a save"]
        assert "checkpoint-1 could not be saved in" in note
        assert " MB" not in note
