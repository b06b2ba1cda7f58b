"""Runs `train_bapo.py` on one rank or two, sends them signals at chosen moments, and starts them again.

`main` takes a list of cases in JSON; for each, a JSON line on the standard output tells what came of it. The processes
are forked from its own, which has imported the libraries.
"""

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from safetensors import safe_open

from bapo_trl import BAPOTrainer
from tests.helpers.save_kills import in_processes
from tests.helpers.script_runs import fill_folder, run


# Two updates of two micro-batches on the samples of a generation
SETTINGS = {
    "config": "quickstart", "gradient_accumulation_steps": "2", "steps_per_generation": "4", "num_iterations": "1",
    "max_steps": "4", "logging_steps": "1", "do_eval": "false",
}  # fmt: skip


def counted(method: str, act=lambda number: None) -> list[str]:
    """Count the calls of a method of the trainer; before each, `act` on its number, from 1."""
    original, calls = getattr(BAPOTrainer, method), []

    def counting(*args, **kwargs):
        calls.append(method)
        act(len(calls))
        return original(*args, **kwargs)

    setattr(BAPOTrainer, method, counting)
    return calls


def trained(case: dict, rank: int, settings: dict) -> dict:
    """Run the script on one rank; return how it ended."""

    def send_signals(number: int) -> None:
        for _ in range(case.get("times", 1) if number == case["call"] else 0):
            os.kill(os.getpid(), getattr(signal, case["signal"]))

    saves, generations = counted("_save_checkpoint"), counted("_generate_and_score_completions")
    if case and rank == case.get("rank", 0):
        counted(case["method"], send_signals)
    ended: str | int = 0
    try:
        run(**{**SETTINGS, **settings})
    except (SystemExit, KeyboardInterrupt) as error:
        ended = error.code if isinstance(error, SystemExit) else type(error).__name__
    sys.stdout.flush()
    kept = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR1)]
    return {
        "ended": ended,
        "saves": len(saves),
        "generations": len(generations),
        "handlers_are_back": kept == [signal.default_int_handler, signal.SIG_DFL],
    }


def weights(folder: Path) -> list[list]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return [[name, file.get_tensor(name).flatten().tolist()] for name in sorted(file.keys())]


def wrong_end(result: dict | int) -> dict:
    return result if isinstance(result, dict) else {"ended": os.waitstatus_to_exitcode(result)}


def outcome(case: dict, folder: Path) -> dict:
    """Send the signal, start the run again; return what both left."""
    ranks, settings, out = case.get("ranks", 1), case.get("settings", {}), folder / "out"

    def start(case, settings):
        results = in_processes(ranks, folder, lambda rank: trained(case, rank, settings))
        return [wrong_end(result) for result in results]

    stopped = start(case, settings)
    told = (folder / "rank-0.log").read_text()
    left = sorted(path.name for path in out.iterdir()) if out.exists() else []
    result = {"stopped": stopped, "told": told, "left": left}
    if any(name.startswith("checkpoint-") for name in left):
        result["resumed"] = start({}, {**settings, "resume_from_checkpoint": "true"})
        with suppress(FileNotFoundError):
            result["updates"] = json.loads((out / "trainer_state.json").read_text())["global_step"]
            uninterrupted = f"straight-{ranks}"
            result["is_as_uninterrupted"] = weights(out) == weights(Path("..", uninterrupted, "out"))
    return result


def main(folder: str, cases: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background would ignore it
    sys.modules["matplotlib"] = None  # drawing reports would take most of the time
    for ranks in (1, 2):
        path = Path(folder, f"straight-{ranks}")
        with pytest.MonkeyPatch.context() as patch:
            path.mkdir()
            fill_folder(path, patch)
            results = in_processes(ranks, path, lambda rank: trained({}, rank, {}))
            assert [result["ended"] for result in results] == [0] * ranks, (path / "rank-0.log").read_text()[-3000:]
    for number, case in enumerate(json.loads(cases)):
        path = Path(folder, f"case-{number:02d}")
        with pytest.MonkeyPatch.context() as patch:
            path.mkdir()
            fill_folder(path, patch)
            print(json.dumps(outcome(case, path)), flush=True)
