"""Kills one of two ranks at random moments of a run with replay and partial rollouts, and starts the run again.

    python -m tests.helpers.random_kills FOLDER COUNT

For each kill, a JSON line on the standard output tells what was killed and what went wrong afterwards, if anything.
The processes are forked from this one, which has imported the libraries. See `save_kills` for every event of a save.
"""

import hashlib
import json
import os
import random
import signal
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import NamedTuple

from transformers import TrainerCallback

from bapo_trl.replay.rows import rows_to_batch
from tests.helpers.save_events import SaveEvents
from tests.helpers.save_kills import PARTIAL_REPLAY, Run, in_processes
from tests.replay.test_mixer import Spy, fingerprint
from tests.rollouts.test_rollout_rounds import trainer_of


PHASES = ("generation", "save", "scoring", "step", "look-ahead")
UPDATES_OF_GENERATION = 2


def digest(name) -> str:
    return hashlib.sha256(repr(name).encode()).hexdigest()[:16]


class Recorder(Spy):
    """Writes down as it goes what each update trains and where it may come from; a kill leaves what was written."""

    diary: Path

    def _write(self, kind: str, rows: list[str], update: int) -> None:
        with open(self.diary, "a") as file:
            file.write(json.dumps({"kind": kind, "update": update, "rows": rows}) + "\n")

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            for chunk in self._replay.queue.state()[0]:
                batch = rows_to_batch(chunk, self._tokenizer.pad_token_id, "cpu")
                rows = [digest(fingerprint(batch, index)) for index in range(len(batch["advantages"]))]
                self._write("queued", rows, self.state.global_step)

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        names, _ = self.generated[-1]
        self._write("generated", [digest(name) for name in names], self.state.global_step)
        self._write("prompts", [row["prompt"] for row in inputs[:: self.num_generations]], self.state.global_step)
        return output

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        if self.accelerator.sync_gradients:
            self._write("trained", [digest(name) for name, *_ in self.trained], self.state.global_step + 1)
            self.trained.clear()
        return loss


class Moments(TrainerCallback):
    """Counts the moments of each phase but the save, and kills the process at one."""

    def __init__(self, phase: str | None = None, number: int | None = None):
        self.names: list[str] = []
        self.follows_write: list[bool] = []  # no file is torn here
        self._kill_at = (phase, number)

    def watch(self, trainer) -> None:
        for phase, method in (
            ("generation", "_continue_completions"),
            ("scoring", "_calculate_rewards"),
            ("look-ahead", "_begin_update"),
            ("step", "training_step"),
        ):
            setattr(trainer, method, self._before(phase, getattr(trainer, method)))
        trainer.add_callback(self)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self._happens("step")

    def on_optimizer_step(self, args, state, control, **kwargs):
        self._happens("step")

    def _before(self, phase, call):
        def watched(*args, **kwargs):
            self._happens(phase)
            return call(*args, **kwargs)

        return watched

    def _happens(self, phase):
        if self._kill_at == (phase, self.names.count(phase)):
            os.kill(os.getpid(), signal.SIGKILL)
        self.names.append(phase)
        self.follows_write.append(False)


class Kill(NamedTuple):
    """At which moment of a phase, counted from 0, a rank is killed; within a save, of the checkpoint at an update."""

    saves: str  # at the ends of generations, or anywhere
    phase: str
    rank: int
    number: int
    update: int | None

    def events(self) -> Moments | SaveEvents:
        return Moments(self.phase, self.number) if self.update is None else SaveEvents(self.update, self.number)


make_trainer = partial(trainer_of, trainer_class=Recorder)
RUNS = {
    # Two passes of one update
    "boundaries": Run(2, make_trainer, {**PARTIAL_REPLAY, "num_iterations": 2, "steps_per_generation": 2}, 2, []),
    # One pass of two updates, saved after every third
    "anywhere": Run(2, make_trainer, {**PARTIAL_REPLAY, "num_iterations": 1, "steps_per_generation": 4}, 3, []),
}


def is_boundary(update: int) -> bool:
    return update % UPDATES_OF_GENERATION == 0


def train(run: Run, folder: Path, life: str, resume: bool, killed_rank: int | None = None, events=None) -> list:
    """Run the ranks until they end or one is killed."""

    def of_rank(rank):
        Recorder.diary = folder / f"{life}-{rank}.jsonl"
        return run.train(folder / "out", resume, events if rank == killed_rank else None, save_total_limit=2)

    return in_processes(run.ranks, folder, of_rank)


def diary(folder: Path, life: str, rank: int, kind: str) -> dict[int, Counter]:
    """Return the rows of each update, how often each."""
    rows: dict[int, Counter] = {}
    path = folder / f"{life}-{rank}.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        entry = json.loads(line)
        if entry["kind"] == kind:
            rows.setdefault(entry["update"], Counter()).update(entry["rows"])
    return rows


def checkpoint_updates(folder: Path) -> list[int]:
    out = folder / "out"
    names = os.listdir(out) if out.exists() else []
    return [int(name.split("-")[1]) for name in names if name.startswith("checkpoint-")]


def wrong_rows(run: Run, folder: Path, straight: Path, saved: int) -> list[str]:
    """Return where what was trained is not what docs/reliability.md says."""
    wrong = []
    for rank in range(run.ranks):
        trained = {life: diary(folder, life, rank, "trained") for life in ("first", "second")}
        expected = diary(straight, "first", rank, "trained")
        kept = {update: rows for update, rows in trained["first"].items() if update <= saved}
        if kept != {update: rows for update, rows in expected.items() if update <= saved}:
            wrong.append(f"rank {rank}: other rows before the checkpoint")
        if sorted(trained["second"]) != list(range(saved + 1, run.max_steps + 1)):
            wrong.append(f"rank {rank}: the updates {sorted(trained['second'])} after that at {saved}")
        after = {update: rows for update, rows in expected.items() if update > saved}
        if is_boundary(saved):
            if trained["second"] != after:
                wrong.append(f"rank {rank}: rows lost or trained twice")
            continue
        # Within a generation: one more of the same prompts takes the place of what was left of it
        began = saved - saved % UPDATES_OF_GENERATION
        prompts = diary(folder, "second", rank, "prompts").get(saved)
        if prompts != diary(straight, "first", rank, "prompts")[began]:
            wrong.append(f"rank {rank}: the generation that is made again has other prompts")
        sources = diary(folder, "second", rank, "generated").values(), diary(folder, "second", rank, "queued").values()
        known = {row for source in sources for rows in source for row in rows}
        if not all(row in known for rows in trained["second"].values() for row in rows):
            wrong.append(f"rank {rank}: a row that was neither made again nor in the queue of the checkpoint")
        queued = {row for rows in diary(folder, "second", rank, "queued").values() for row in rows}
        abandoned = diary(straight, "first", rank, "generated")[began].keys() - queued
        made = {row for rows in diary(folder, "second", rank, "generated").values() for row in rows}
        if any(row in abandoned - made for rows in trained["second"].values() for row in rows):
            wrong.append(f"rank {rank}: a row of the generation that was given up")
    return wrong


def wrong_after(kill: Kill, folder: Path, straight: Path, weights: str) -> tuple[list[str], int]:
    """Kill a run, start it again; return what went wrong, and the update it went on from."""
    run = RUNS[kill.saves]
    folder.mkdir()
    if train(run, folder, "first", False, kill.rank, kill.events())[kill.rank] != signal.SIGKILL:
        return ["was not killed"], 0
    saved = max(checkpoint_updates(folder), default=0)
    results = train(run, folder, "second", resume=saved > 0)
    if not all(isinstance(result, dict) for result in results):
        return ["not resumed", *((folder / f"rank-{rank}.log").read_text()[-600:] for rank in range(run.ranks))], saved
    wrong = wrong_rows(run, folder, straight, saved)
    if {result["start"] for result in results} != {saved}:
        wrong.append(f"went on from {results[0]['start']} instead of {saved}")
    if len({result["weights"] for result in results}) > 1:
        wrong.append("the ranks end with different weights")
    if is_boundary(saved) and results[0]["weights"] != weights:
        wrong.append("other weights at the end")
    return wrong, saved


def uninterrupted(saves: str, folder: Path) -> tuple[str, list[list[str]], list[list[str]]]:
    """Train without a kill; return the weights at the end, and of each rank the moments and the events of a save."""
    run = RUNS[saves]
    folder.mkdir()
    (folder / "watched").mkdir()

    def counting(rank):
        Recorder.diary = folder / f"first-{rank}.jsonl"
        return run.train(folder / "out", False, Moments(), save_total_limit=2)

    def saving(rank):
        Recorder.diary = folder / "watched" / f"{rank}.jsonl"
        return run.train(folder / "watched" / "out", False, SaveEvents(2 * run.save_steps), save_total_limit=2)

    results, watched = (in_processes(run.ranks, folder, task) for task in (counting, saving))
    assert all(isinstance(result, dict) for result in results + watched), (folder / "rank-0.log").read_text()[-3000:]
    moments, events = ([[name for name, _ in each["events"]] for each in one] for one in (results, watched))
    return results[0]["weights"], moments, [names[: names.index("end") + 1] for names in events]


def main(folder: str, count: str) -> None:
    draw = random.Random(20)
    straight = {saves: uninterrupted(saves, Path(folder, f"straight-{saves}")) for saves in RUNS}
    for number in range(int(count)):
        saves, phase, rank = list(RUNS)[number % 2], PHASES[number % len(PHASES)], (number + number // 2) % 2
        weights, moments, events = straight[saves]
        if phase == "save":
            steps = RUNS[saves].save_steps
            kill = Kill(saves, phase, rank, draw.randrange(len(events[rank])), steps * draw.randint(1, 3))
        else:
            kill = Kill(saves, phase, rank, draw.randrange(moments[rank].count(phase)), None)
        path = Path(folder, f"killed-{number:02d}")
        wrong, saved = wrong_after(kill, path, Path(folder, f"straight-{saves}"), weights)
        print(json.dumps({**kill._asdict(), "resumed_from": saved, "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
