"""An error that only the main process runs into ends the other ranks with it, which would wait for it."""

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
from accelerate import Accelerator
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from bapo_trl import cli
from bapo_trl.checkpoints.rank_errors import from_main_process
from bapo_trl.evaluation import measure
from bapo_trl.evaluation.sampling import EvaluatedTrainer
from bapo_trl.script.run import train as training
from bapo_trl.upstream.fixes import end_training
from tests.helpers.commands import ROOT, succeeded
from tests.helpers.forked import run_function
from tests.helpers.script_runs import flags
from tests.helpers.toy import toy_dataset, toy_trainer


NO_ROOM = r"OSError: (On rank 0: )?.*No space left on device"
RAISED = {
    # On rank 0, on rank 1
    "completions that are a folder": (r"IsADirectoryError: ", r"OSError: On rank 0: .*Is a directory"),
    "completions on a full disk": (NO_ROOM, NO_ROOM),
    # It alone reads all prompts
    "prompts": (r"InputError: 1 of the 20 prompts", r"InputError: On rank 0: 1 of the 20 prompts"),
    "earlier run": (NO_ROOM, NO_ROOM),
    "model on a full disk": (NO_ROOM, NO_ROOM),
    "callback in a save": (r"KeyError: 'mine'", r"RuntimeError: On rank 0: 'mine'"),
}


class Counter(TrainerCallback, ExportableState):
    """Has a state until the first update is made."""

    is_broken = False

    def on_step_end(self, args, state, control, **kwargs):
        self.is_broken = True

    def state(self) -> dict:
        if self.is_broken:
            raise KeyError("mine")
        return {}


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def places(folder: Path, accelerator: Accelerator) -> dict[str, Callable[[], object]]:
    is_main = accelerator.is_main_process

    def evaluated(path: Path):
        trainer = toy_trainer(folder / "evaluated", trainer_class=EvaluatedTrainer, per_device_eval_batch_size=6)
        return measure.evaluate(trainer, toy_dataset(4), path)

    def on_a_full_disk(owner, name: str, call: Callable[[], object], on_other_ranks=full):
        with patch.object(owner, name, full if is_main else on_other_ranks):
            return call()

    def trained(name: str, **settings):
        return cli.train(flags(dataset_name="train.jsonl", output_dir=folder / name, **settings))

    def saved_callback():
        saves = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
        parts = {"callbacks": [Counter()] if is_main else []}
        return toy_trainer(folder / "callback", trainer_args=parts, **saves).train()

    return {
        "result": from_main_process(lambda: ["of", "main"] if is_main else None),
        "completions that are a folder": lambda: evaluated(folder),
        "completions on a full disk": lambda: on_a_full_disk(
            measure, "_write", lambda: evaluated(folder / "completions.jsonl")
        ),
        "prompts": lambda: cli.train(flags(dataset_name="empty.jsonl")),
        "earlier run": lambda: on_a_full_disk(training, "remove_earlier_run", lambda: trained("earlier")),
        "model on a full disk": lambda: on_a_full_disk(
            EvaluatedTrainer, "save_model", lambda: trained("full", max_steps=1), lambda *args: None
        ),
        "callback in a save": saved_callback,
    }


def fail_on_the_main_process(folder: str) -> None:
    """Write what each rank raised at each place. One that waited for the other at some place would not end."""
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    found = {}
    for name, call in places(Path(folder), accelerator).items():
        try:
            found[name] = call()
        except Exception as error:
            found[name] = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    Path(folder, f"{accelerator.process_index}.json").write_text(json.dumps(found))
    end_training(toy_trainer(Path(folder) / "last"))


@pytest.mark.processes
def test_an_error_of_the_main_process_alone_ends_both_ranks(folder):
    rows = [{"prompt": "" if number == 7 else f"{number}+1="} for number in range(20)]
    (folder / "empty.jsonl").write_text("\n".join(map(json.dumps, rows)))
    succeeded(run_function(fail_on_the_main_process, folder, ranks=2, cwd=folder, timeout_s=150, PYTHONPATH=str(ROOT)))
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
