"""
Faults that a run must survive: kills in the middle of a save and in the training after it, at chosen events.

`kill_and_resume` takes a folder, a kind of `RUNS`, and how many kills: one, few or all, which is every event of every
rank; of `anywhere`, 20. For each kill, a JSON line on the standard output tells what went wrong afterwards.
"""

import hashlib
import json
import os
import random
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import safe_open
from transformers import TrainerCallback

from bapo_trl import BAPOTrainer
from bapo_trl.checkpoints import atomic
from bapo_trl.checkpoints.files import UNFINISHED
from bapo_trl.rollouts.partial import PartialRollouts
from bapo_trl.upstream.fixes import end_training
from tests.helpers.alike import TIMES
from tests.helpers.commands import free_port
from tests.helpers.toy import toy_model, toy_trainer
from tests.replay.test_mixer import REPLAY
from tests.rollouts.test_rollout_rounds import PARTIAL, trainer_of


STATE_SUFFIXES = (".safetensors", ".pt", ".pth")


class SaveEvents:
    """
    Lists what a process does from the save at one update to the next save, and kills it before an event, named or
    numbered.

    Events of the save are what Python audits (files opened for writing, renames, removals), the writers of torch and
    safetensors, which it does not see, waiting for the other ranks, the start and the end. After it come the rounds of
    partial rollouts and the micro-batches, numbered from 1. A process that `tears` cuts the file that was written
    since the event before in half first, as if the kill had come within it. Without an update, all events of a run up
    to its last save are listed.
    """

    def __init__(self, update: int | None, kill_at: int | str | None = None, tears: bool = False):
        self.names: list[str] = []
        self.follows_write: list[bool] = []
        self._update, self._kill_at, self._tears = update, kill_at, tears
        self._latest: str | None = None
        self._is_watched, self._is_saving = update is None, False

    def watch(self, trainer) -> None:
        save, on_all_ranks = trainer._save_checkpoint, atomic.raising_on_all_ranks

        def watched_save(*args, **kwargs):
            step = trainer.state.global_step
            is_watched = step < trainer.state.max_steps if self._update is None else step == self._update
            self._is_watched = self._is_saving = is_watched
            self._happens("start")
            save(*args, **kwargs)
            self._happens("end")
            self._is_saving = False

        @contextmanager
        def watched_wait(*args, **kwargs):
            with on_all_ranks(*args, **kwargs):
                yield
                if self._is_saving:
                    self._happens("wait")

        trainer._save_checkpoint, atomic.raising_on_all_ranks = watched_save, watched_wait
        PartialRollouts._continue = self._numbered(PartialRollouts._continue, "round")
        trainer.training_step = self._numbered(trainer.training_step, "micro-batch")
        sys.addaudithook(self._audit)
        torch.save = self._watched(torch.save, "torch.save")
        safetensors.torch.serialize_file = self._watched(safetensors.torch.serialize_file, "safetensors")

    def _watched(self, write, name):
        def watched_write(content, path, *args, **kwargs):
            self._happens(f"{name} {os.path.basename(path)}")
            write(content, path, *args, **kwargs)
            if self._is_saving:
                self._latest = str(path)

        return watched_write

    def _numbered(self, call, name):
        def numbered_call(*args, **kwargs):
            count = sum(event.startswith(name) for event in self.names)
            self._happens(f"{name} {count + 1}")
            return call(*args, **kwargs)

        return numbered_call

    def _audit(self, event, args):
        if not self._is_saving:
            return
        if event == "open" and isinstance(args[0], str) and args[2] & (os.O_WRONLY | os.O_RDWR):
            self._happens(f"open {os.path.basename(args[0])}")
            self._latest = args[0]
        elif event in ("os.rename", "os.remove", "os.rmdir"):
            self._happens(f"{event} {os.path.basename(args[0])}")

    def _happens(self, name):
        if not self._is_watched:
            return
        if self._kill_at in (name, len(self.names)):
            if self._tears:
                os.truncate(self._latest, os.path.getsize(self._latest) // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        self.names.append(name)
        self.follows_write.append(self._latest is not None)
        self._latest = None


class Start(TrainerCallback):
    update = None

    def on_train_begin(self, args, state, control, **kwargs):
        self.update = state.global_step


def names(folder) -> set[str]:
    """Return what is in a folder; of the folders of unfinished saves, without the id of the run."""
    found = {path.name for path in Path(folder).iterdir()} - {"README.md"}
    return {re.sub(rf"^{UNFINISHED}-[0-9a-f]{{8}}-\d+$", UNFINISHED, name) for name in found}


# Runs to kill


class Run(NamedTuple):
    """
    A run to kill. It saves four times; what is killed is the second save, which rotates the first one out, and the
    training up to the third. If it is `anywhere`, random moments of the run up to its last save are.

    `few` are the kills of all runs of the tests: the rank, the event, whether within the file before it.
    """

    ranks: int
    make_trainer: Callable[..., BAPOTrainer]
    settings: dict[str, Any]
    save_steps: int
    few: list[tuple[int, str, bool]]
    anywhere: bool = False

    @property
    def killed_save(self) -> int | None:
        return None if self.anywhere else 2 * self.save_steps

    @property
    def max_steps(self) -> int:
        return 4 * self.save_steps

    def train(
        self, folder: Path, resume: bool, events: SaveEvents | None = None, save_total_limit: int | None = 1
    ) -> dict:
        start = Start()
        saves = {"save_strategy": "steps", "save_steps": self.save_steps, "save_total_limit": save_total_limit}
        settings = {**self.settings, **saves, "max_steps": self.max_steps}
        trainer = self.make_trainer(folder, trainer_args={"callbacks": [start]}, **settings)
        if events is not None:
            events.watch(trainer)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.train(resume_from_checkpoint=resume)
        weights = b"".join(weight.detach().cpu().numpy().tobytes() for weight in trainer.model.state_dict().values())
        left_out = TIMES | {"train_loss"}  # transformers' mean over the updates since the resume
        logs = [{key: value for key, value in log.items() if key not in left_out} for log in trainer.state.log_history]
        result = {
            "logs": hashlib.sha256(json.dumps(logs, sort_keys=True).encode()).hexdigest(),
            "weights": hashlib.sha256(weights).hexdigest(),
            "start": start.update,
            "processes": trainer.accelerator.num_processes,
            "warnings": [str(warning.message) for warning in caught],
        }
        if events is not None:
            result["events"] = list(zip(events.names, events.follows_write, strict=True))
        end_training(trainer)
        return result


def trainer_with_reference(folder: Path, **settings) -> BAPOTrainer:
    """TRL loads the reference model from the folder of the model."""
    model = Path(folder).parent / "model"
    if not model.is_dir():
        toy_model().save_pretrained(model)
    return toy_trainer(folder, str(model), **settings)


# A large learning rate lets the lengths run off
PARTIAL_REPLAY = {**PARTIAL, **REPLAY, "partial_rollout_oversampling": 1.5, "learning_rate": 5e-3}

# 12 rows a generation on one rank, 8 on each of two, in groups of 2, of which half are held over
OF_ONE_RANK = {**PARTIAL_REPLAY, "per_device_train_batch_size": 2}
OF_TWO_PASSES = {**PARTIAL_REPLAY, "num_iterations": 2, "steps_per_generation": 2}
# No save cuts a log line in two: its first part would be lost
REFERENCE = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 3, "logging_steps": 2}
FEW_OF_REPLAY = [
    (0, "start", False),
    (0, "open tokenizer_config.json", True),  # within model.safetensors
    (0, "torch.save optimizer.pt", False),
    (0, "wait", True),  # within what the parents write last, and within the manifest
    (0, "os.rename checkpoint-2", False),
    (0, "os.remove model.safetensors", False),
]
FEW_OF_ONE_RANK = [
    (0, "safetensors replay_queue_00000_of_00001.safetensors", True),  # within the pool
    (0, "os.rename checkpoint-6", False),
    (0, "round 3", False),
    (0, "micro-batch 2", False),  # half of an update
]
FEW_OF_TWO_PASSES = [
    (1, "wait", True),  # within the last of its files, when all have written
    (1, "round 2", False),
    (0, "micro-batch 3", False),  # between two passes
]
FEW_OF_REFERENCE = [
    (0, "safetensors ref_model_00000_of_00001.safetensors", True),
    (0, "os.rename checkpoint-4", False),
    (0, "micro-batch 3", False),
]

RUNS = {
    "replay": [
        Run(1, toy_trainer, REPLAY, 2, FEW_OF_REPLAY),
        Run(2, toy_trainer, REPLAY, 2, [(0, "os.rename checkpoint-4", False), (1, "wait", True)]),
    ],
    "partial": [
        Run(1, trainer_of, OF_ONE_RANK, 3, FEW_OF_ONE_RANK),
        Run(2, trainer_of, {**OF_TWO_PASSES, "replay_zero_advantage": True}, 2, FEW_OF_TWO_PASSES),
    ],
    "reference": [Run(1, trainer_with_reference, REFERENCE, 4, FEW_OF_REFERENCE)],
    "anywhere": [Run(2, trainer_of, OF_TWO_PASSES, 2, [], anywhere=True)],  # a generation is two passes of one update
}


class Kill(NamedTuple):
    """Which of the ranks is killed, before which event, and whether within the file written last."""

    ranks: int
    rank: int
    event: int
    tears: bool
    name: str


def in_processes(ranks: int, folder: Path, task) -> list[dict | int]:
    """Run `task(rank)` in forked ranks; return what each returns, or the wait status of one that failed."""
    port, running = free_port(), {}
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                if ranks > 1:
                    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
                    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                with open(folder / f"rank-{rank}.log", "w") as log:
                    os.dup2(log.fileno(), 1)
                    os.dup2(log.fileno(), 2)
                (folder / f"rank-{rank}.json").write_text(json.dumps(task(rank)))
                status = 0
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            os._exit(status)
        running[pid] = rank
    results = [0] * ranks
    while running:
        pid, status = os.wait()
        rank = running.pop(pid)
        results[rank] = status or json.loads((folder / f"rank-{rank}.json").read_text())
        for other in running if status else ():  # as launchers do
            os.kill(other, signal.SIGKILL)
    return results


def checkpoints(folder: Path) -> dict[str, set[str]]:
    """Return the files of every checkpoint; of those that are not of one run alone, with their sizes."""
    return {
        path.name: {f"{file.relative_to(path)} {size_of(file)}" for file in path.rglob("*") if file.is_file()}
        for path in folder.iterdir()
        if re.fullmatch(r"checkpoint-\d+", path.name)
    }


def size_of(file: Path) -> int | str:
    if file.suffix == ".json":
        return type(json.loads(file.read_text())).__name__  # times and paths differ; half a file raises
    if file.name == "training_args.bin":  # its size grows with the length of the path
        args = torch.load(file, weights_only=False).to_dict()
        return str({name: value for name, value in args.items() if name not in ("output_dir", "save_total_limit")})
    return file.stat().st_size


def state_of(checkpoint: Path) -> dict[str, str]:
    """Return checksums of the weights, pool, queue, optimizer and random states that a run goes on from."""
    return {file.name: checksum_of(file) for file in checkpoint.rglob("*") if file.suffix in STATE_SUFFIXES}


def checksum_of(file: Path) -> str:
    if file.name.startswith(("replay_queue", "rollout_pool", "carried_curves", "data_place", "ref_model")):
        with safe_open(file, framework="pt") as opened:
            return opened.metadata()["checksum"]  # the entries of the header come in any order
    return hashlib.sha256(file.read_bytes()).hexdigest()


def wrong_after(kill: Kill, run: Run, folder: Path, straight: dict) -> list[str]:
    """Kill a run, start it again; return what went wrong."""
    folder.mkdir()
    out = folder / f"out{'!' * 64}"  # longer than that of the straight run: what is saved holds the path

    def killed(of_rank):
        events = SaveEvents(run.killed_save, kill.event, kill.tears) if of_rank == kill.rank else None
        return run.train(out, False, events)

    if in_processes(kill.ranks, folder, killed)[kill.rank] != signal.SIGKILL:
        return ["was not killed"]
    wrong = []
    try:
        for name, files in checkpoints(out).items():
            if files != straight["checkpoints"][name]:
                wrong.append(f"{name} is not complete: {sorted(straight['checkpoints'][name] ^ files)}")
    except (RuntimeError, ValueError) as error:
        wrong.append(f"a checkpoint is not complete: {error!r}")
    newest = max((int(name.split("-")[1]) for name in os.listdir(out) if name.startswith("checkpoint-")), default=0)
    resumed = in_processes(kill.ranks, folder, lambda of_rank: run.train(out, resume=newest > 0))
    last = f"checkpoint-{run.max_steps}"
    if not all(isinstance(result, dict) for result in resumed):
        wrong += ["not resumed", *((folder / f"rank-{rank}.log").read_text()[-600:] for rank in range(kill.ranks))]
    elif {result["weights"] for result in resumed} != {straight["weights"]}:
        wrong.append("other weights at the end")
    elif resumed[0]["logs"] != straight["logs"]:
        wrong.append("other logs at the end")
    elif {result["start"] for result in resumed} != {newest}:
        wrong.append(f"resumed from {resumed[0]['start']} instead of {newest}")
    elif set(os.listdir(out)) - {"README.md"} != {last}:
        wrong.append(f"left behind: {os.listdir(out)}")
    elif state_of(out / last) != straight["state"]:
        wrong.append(f"another state at the end: {set(state_of(out / last).items()) ^ set(straight['state'].items())}")
    return wrong


def straight_run(run: Run, folder: Path) -> dict:
    """Train without a kill; return weights and state at the end, the files of the checkpoints, each rank's events."""
    folder.mkdir()

    def keeping_all(rank):
        return run.train(folder / "keep", False, save_total_limit=None)

    def watched(rank):
        return run.train(folder / "once", False, SaveEvents(run.killed_save))

    kept, results = (in_processes(run.ranks, folder, task) for task in (keeping_all, watched))
    assert all(isinstance(result, dict) for result in kept + results), (folder / "rank-0.log").read_text()[-3000:]
    assert {result["weights"] for result in kept + results} == {kept[0]["weights"]}
    assert {result["processes"] for result in results} == {run.ranks}
    return {
        "weights": kept[0]["weights"],
        "logs": kept[0]["logs"],
        "state": state_of(folder / "keep" / f"checkpoint-{run.max_steps}"),
        "checkpoints": checkpoints(folder / "keep"),
        "events": [result["events"] for result in results],
    }


def all_kills(events: list[list[tuple[str, bool]]]) -> Iterator[Kill]:
    for rank, of_rank in enumerate(events):
        for index, (name, follows_write) in enumerate(of_rank):
            yield Kill(len(events), rank, index, False, name)
            if follows_write:
                yield Kill(len(events), rank, index, True, name)


def random_kills(kills: list[Kill], count: int) -> list[Kill]:
    """Draw that many of each rank within saves, and as many of each between saves."""
    draw, kinds = random.Random(20), {}
    for kill in kills:
        kinds.setdefault((kill.rank, kill.name.startswith(("round", "micro-batch"))), []).append(kill)
    return [kill for of_kind in kinds.values() for kill in draw.sample(of_kind, count)]


def kill_and_resume(folder: str, kind: str, which: str) -> None:
    for run in RUNS[kind][:1] if which == "one" else RUNS[kind]:
        straight = straight_run(run, Path(folder, f"straight-{run.ranks}"))
        kills = list(all_kills(straight["events"]))
        if run.anywhere:
            kills = random_kills(kills, 5 if which == "all" else 1)
        elif which != "all":
            kills = [kill for kill in kills if (kill.rank, kill.name, kill.tears) in run.few]
        for number, kill in enumerate(kills[:1] if which == "one" else kills):
            wrong = wrong_after(kill, run, Path(folder, f"killed-{run.ranks}-{number:02d}"), straight)
            print(json.dumps({**kill._asdict(), "wrong": wrong}), flush=True)
