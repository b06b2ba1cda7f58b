"""Kills trainers in the middle of a save, at chosen file-system events, and starts them again.

    python -m tests.helpers.save_kills FOLDER few|all

For each kill, a JSON line on the standard output tells what went wrong afterwards, if anything. The processes are
forked from this one, which has imported the libraries: a kill takes seconds. `all` takes every event of every rank.
"""

import hashlib
import json
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bapo_trl.upstream_fixes import end_training
from tests.helpers.commands import free_port
from tests.helpers.save_events import SaveEvents, Start
from tests.helpers.toy import toy_trainer
from tests.replay.test_mixer import REPLAY


SETTINGS = {**REPLAY, "max_steps": 8, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
KILLED_SAVE = 4  # at this update: the checkpoint of update 2 is there, and is rotated out


class Kill(NamedTuple):
    """Which of the ranks is killed, before which event of its save, and whether within the file written last."""

    ranks: int
    rank: int
    event: int
    tears: bool
    name: str


def train(folder: Path, resume: bool, events: SaveEvents | None = None) -> dict:
    start = Start()
    trainer = toy_trainer(folder, trainer_args={"callbacks": [start]}, **SETTINGS)
    if events is not None:
        events.watch(trainer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train(resume_from_checkpoint=resume)
    weights = b"".join(weight.detach().numpy().tobytes() for weight in trainer.model.state_dict().values())
    result = {
        "weights": hashlib.sha256(weights).hexdigest(),
        "start": start.update,
        "processes": trainer.accelerator.num_processes,
        "warnings": [str(warning.message) for warning in caught],
    }
    if events is not None:
        result["events"] = list(zip(events.names, events.follows_write, strict=True))
    end_training(trainer)
    return result


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
    return file.stat().st_size


def wrong_after(kill: Kill, folder: Path, straight: dict) -> list[str]:
    """Kill a run, start it again; return what went wrong."""
    folder.mkdir()
    out = folder / "out!"  # as long as the name of the straight run: a file of the checkpoint holds it

    def killed(of_rank):
        return train(out, False, SaveEvents(KILLED_SAVE, kill.event, kill.tears) if of_rank == kill.rank else None)

    if in_processes(kill.ranks, folder, killed)[kill.rank] != signal.SIGKILL:
        return ["was not killed"]
    wrong = []
    try:
        for name, files in checkpoints(out).items():
            if files != straight["checkpoints"][name]:
                wrong.append(f"{name} is not whole: {sorted(straight['checkpoints'][name] ^ files)}")
    except ValueError as error:
        wrong.append(f"a checkpoint is not whole: {error!r}")
    newest = max(int(name.split("-")[1]) for name in os.listdir(out) if name.startswith("checkpoint-"))
    resumed = in_processes(kill.ranks, folder, lambda of_rank: train(out, True))
    if not all(isinstance(result, dict) for result in resumed):
        wrong += ["not resumed", *((folder / f"rank-{rank}.log").read_text()[-600:] for rank in range(kill.ranks))]
    elif {result["weights"] for result in resumed} != {straight["weights"]}:
        wrong.append("other weights at the end")
    elif {result["start"] for result in resumed} != {newest}:
        wrong.append(f"resumed from {resumed[0]['start']} instead of {newest}")
    elif set(os.listdir(out)) - {"README.md"} != {"checkpoint-8"}:
        wrong.append(f"left behind: {os.listdir(out)}")
    return wrong


def straight_run(folder: Path, ranks: int) -> dict:
    """Train without a kill; return the end weights, the files of the checkpoints, the events of each rank."""
    folder.mkdir()

    def keeping_all(rank):
        SETTINGS["save_total_limit"] = None
        return train(folder / "keep", False)

    def watched(rank):
        return train(folder / "once", False, SaveEvents(KILLED_SAVE))

    kept, results = (in_processes(ranks, folder, task) for task in (keeping_all, watched))
    assert all(isinstance(result, dict) for result in kept + results), (folder / "rank-0.log").read_text()[-3000:]
    assert {result["weights"] for result in kept + results} == {kept[0]["weights"]}
    assert {result["processes"] for result in results} == {ranks}
    return {
        "weights": kept[0]["weights"],
        "checkpoints": checkpoints(folder / "keep"),
        "events": [result["events"] for result in results],
    }


def all_kills(events: list[list[tuple[str, bool]]]) -> Iterator[Kill]:
    for rank, of_rank in enumerate(events):
        for index, (name, follows_write) in enumerate(of_rank):
            yield Kill(len(events), rank, index, False, name)
            if follows_write:
                yield Kill(len(events), rank, index, True, name)


# For each number of ranks: the rank, the event, whether within the file before it
FEW = {
    1: [
        (0, "start", False),
        (0, "open tokenizer_config.json", True),  # within model.safetensors
        (0, "torch.save optimizer.pt", False),
        (0, "os.rename checkpoint-4", True),  # within the manifest
        (0, "os.rename checkpoint-2", False),
        (0, "os.remove model.safetensors", False),
    ],
    2: [(0, "os.rename checkpoint-4", False), (1, "wait", True)],
}


def main(folder: str, which: str) -> None:
    for ranks, few in FEW.items():
        straight = straight_run(Path(folder, f"straight-{ranks}"), ranks)
        kills = [
            kill
            for kill in all_kills(straight["events"])
            if which == "all" or (kill.rank, kill.name, kill.tears) in few
        ]
        for number, kill in enumerate(kills):
            wrong = wrong_after(kill, Path(folder, f"killed-{ranks}-{number:02d}"), straight)
            print(json.dumps({**kill._asdict(), "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
