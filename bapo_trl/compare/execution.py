"""Makes the runs of a study, some at a time, each as a process of its own."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue

from ..checkpoints.run_lock import RunLock
from ..errors import InputError
from .results import FOLDER, Row, read_rows, row_of, write_row
from .study import Run, Study, as_arguments


def find_finished(runs: Sequence[Run], folder: Path) -> dict[str, Row]:
    """
    Return the rows that a folder has of some runs, by the key of the run.

    Refuse results of other settings (`InputError`), but for runs that failed.
    """
    rows = read_rows(folder)
    finished = {run.key: rows[run.key] for run in runs if run.key in rows}
    ended = {key: row for key, row in rows.items() if row.error is None}
    by_name = {(row.arm, str(sorted(row.over.items())), row.seed): (key, row) for key, row in ended.items()}
    for run in runs:
        key, row = by_name.get((run.arm, str(sorted(run.over.items())), run.seed), (None, None))
        if run.key not in finished and row is not None:
            was, now = row.settings, run.settings
            changed = sorted(name for name in {*was, *now} if was.get(name) != now.get(name))
            described = ", ".join(f"{name} {was.get(name)!r}, now {now.get(name)!r}" for name in changed)
            raise InputError(
                f"{folder / FOLDER / key}.json is a result of other settings ({described}): give another "
                "`--output_dir`, or remove it."
            )
    return finished


def make_runs(study: Study, runs: Sequence[Run], folder: Path, jobs: int, say: Callable[[str], None]) -> None:
    """
    Make runs that have no row yet, `jobs` at a time; write a row for each when it ends, with its error if it fails.

    Logs and settings of a run stay in `logs`, its model is deleted. `say` gets a line for each run that ends.
    """
    started = time.monotonic()
    free: SimpleQueue[dict[str, str]] = SimpleQueue()
    for environment in _environments(jobs, study.processes()):
        free.put(environment)

    def make(run: Run) -> Row:
        environment = free.get()
        try:
            return _make(run, study.accelerate, folder, environment)
        finally:
            free.put(environment)

    with _ending_on_sigterm(), ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(make, run): run for run in runs}
        try:
            for done, future in enumerate(as_completed(futures), start=1):
                run, row = futures[future], future.result()
                write_row(row, folder / FOLDER / f"{run.key}.json")
                left = (time.monotonic() - started) / done * (len(runs) - done)
                found = f"failed: {row.error}" if row.final is None else f"{row.final:.3f}"
                say(
                    f"[{done}/{len(runs)}] {run.label}: {found}, {timedelta(seconds=round(row.seconds))}; "
                    f"left about {timedelta(seconds=round(left))}"
                )
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(_running):
                process.terminate()
            raise


_running: set[subprocess.Popen] = set()


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Have SIGTERM, which a job at its time limit gets, end the runs too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def command_of(run: Run, accelerate: str | None, output_dir: str) -> list[str]:
    """Return the command of a run: `bapo-trl train`, or its launch with a configuration of accelerate."""
    launch = [] if accelerate is None else ["launch", "--accelerate", accelerate]
    arguments = [*as_arguments(run.flags), "--output_dir", output_dir]
    return [sys.executable, "-m", "bapo_trl", *launch, "train", *arguments]


def _environments(jobs: int, processes: int) -> list[dict[str, str]]:
    """
    Return the environments of the runs that are made at one time.

    One of a single process would spread its model over all GPUs: beside others it gets one, shared if there are fewer.
    """
    devices = _visible_devices() if jobs > 1 and processes == 1 else []
    chosen = [{"CUDA_VISIBLE_DEVICES": devices[job % len(devices)]} if devices else {} for job in range(jobs)]
    return [{**_threads(jobs * processes), **os.environ, **device} for device in chosen]


def _visible_devices() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


def _threads(processes: int) -> dict[str, str]:
    """Return the variable that gives each of so many processes its share of the cores; none for one alone."""
    if processes == 1:
        return {}
    # Not those of the whole machine: a job of SLURM has some of them
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"OMP_NUM_THREADS": str(max(1, cores // processes))}


def _make(run: Run, accelerate: str | None, folder: Path, environment: dict[str, str]) -> Row:
    log = folder / "logs" / f"{run.key}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    begin = f".run-{run.key}-"
    for left in folder.glob(f"{begin}*"):  # by a run that was killed, unless it still runs
        lock = RunLock(str(left))
        if lock.acquire() is None:
            lock.release()
            shutil.rmtree(left, ignore_errors=True)
    start = folder / "starts" / f"seed-{run.seed}.jsonl"  # of the model that all arms start from: sampled once
    with tempfile.TemporaryDirectory(dir=folder, prefix=begin) as work, log.open("w") as output:
        sampled = Path(work, "eval_completions_before.jsonl")
        if start.exists():
            shutil.copyfile(start, sampled)  # `train` takes no completions of another model, prompts or sampling
        command = command_of(run, accelerate, work)
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
        _running.add(process)
        code = process.wait()
        _running.discard(process)
        seconds = round(time.monotonic() - started, 1)
        if code != 0:
            lines = log.read_text(errors="replace").strip().splitlines()
            reason = next((line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "")
            error = f"exit code {code}: {reason.strip()} ({log})"
            return Row(run.arm, run.over, run.seed, run.settings, seconds=seconds, error=error)
        try:
            row = row_of(run, Path(work), seconds)
            for name in ("trainer_state.json", "run_settings.json"):
                shutil.copyfile(Path(work, name), log.with_suffix(f".{name}"))
            if sampled.exists():  # not where the model is sharded
                start.parent.mkdir(exist_ok=True)
                sampled.replace(start)
        except (OSError, KeyError, ValueError, ArithmeticError) as reason:
            error = f"it left no results ({type(reason).__name__}: {reason}, {log})"
            return Row(run.arm, run.over, run.seed, run.settings, seconds=seconds, error=error)
    return row
