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
from typing import IO

from ..checkpoints.files import checkpoint_names, find_defect, step_of
from ..checkpoints.run_lock import RunLock
from ..checkpoints.stop_signals import EXIT_CODE
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
    by_name = {(row.arm, str(sorted(row.sweep.items())), row.seed): (key, row) for key, row in ended.items()}
    for run in runs:
        key, row = by_name.get((run.arm, str(sorted(run.sweep.items())), run.seed), (None, None))
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

    A run that a signal stopped is resumed from its checkpoint: at once, or by the next call if the signal stops the
    study too. Logs and settings of a run stay in `logs`, its model is deleted. `say` gets a line for each run that
    ends.
    """
    started = time.monotonic()
    free: SimpleQueue[dict[str, str]] = SimpleQueue()
    for environment in environments(study, jobs):
        free.put(environment)
    _is_ending.clear()

    def make(run: Run) -> Row:
        environment = free.get()
        try:
            row = _make(run, study.accelerate, folder, environment)
        finally:
            free.put(environment)
        if row.error is None or not _is_ending.is_set():
            write_row(row, folder / FOLDER / f"{run.key}.json")
        return row

    with _ending_on_sigterm(), ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(make, run): run for run in runs}
        try:
            for done, future in enumerate(as_completed(futures), start=1):
                run, row = futures[future], future.result()
                left = (time.monotonic() - started) / done * (len(runs) - done)
                found = f"failed: {row.error}" if row.final is None else f"{row.final:.3f}"
                say(
                    f"[{done}/{len(runs)}] {run.label}: {found}, {timedelta(seconds=round(row.seconds))}; "
                    f"left about {timedelta(seconds=round(left))}"
                )
        except BaseException:
            _is_ending.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(_running):
                process.terminate()
            raise


_running: set[subprocess.Popen] = set()
_is_ending = threading.Event()  # the study: no run is started or resumed from then on


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


def environments(study: Study, jobs: int) -> list[dict[str, str]]:
    """
    Return the environments of the runs that are made at one time; refuse more than GPUs and servers (`InputError`).

    A run of a single process would spread its model over all GPUs: beside others it gets one, shared if there are
    fewer. One of several processes gets as many of its own.
    """
    server = study.shared_server() if jobs > 1 else None
    if server is not None:
        raise InputError(
            f"`--jobs` is {jobs}, and runs share the vLLM server {server} (`use_vllm`), which has the weights of one "
            "run at a time: set `--jobs` to 1."
        )
    processes = study.processes()
    devices = _visible_devices() if jobs > 1 and (processes == 1 or study.uses_gpus()) else []
    if devices and study.gpu_ids():
        raise InputError(
            f"`gpu_ids` of {study.accelerate} is {study.gpu_ids()}, and the {jobs} runs of `--jobs` would share these "
            "GPUs: set it to 'all' there, and name the GPUs of the study in CUDA_VISIBLE_DEVICES."
        )
    if processes == 1:
        chosen = [devices[job % len(devices)] if devices else None for job in range(jobs)]
    elif devices and len(devices) < jobs * processes:
        raise InputError(
            f"`--jobs` is {jobs}, and each run takes {processes} GPUs (`accelerate` {study.accelerate}): that is "
            f"{jobs * processes} GPUs, and {len(devices)} are visible. Set `--jobs` to "
            f"{max(1, len(devices) // processes)}."
        )
    else:
        chosen = [",".join(devices[job * processes : (job + 1) * processes]) or None for job in range(jobs)]
    named = [{} if device is None else {"CUDA_VISIBLE_DEVICES": device} for device in chosen]
    return [{**_threads(jobs * processes), **os.environ, **device} for device in named]


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
    start = folder / "starts" / f"seed-{run.seed}.jsonl"  # of the model that all arms start from: sampled once
    work = _work_folder(folder, run.key)
    is_kept = False
    try:
        sampled = work / "eval_completions_before.jsonl"
        if start.exists() and not sampled.exists():
            shutil.copyfile(start, sampled)  # `train` takes no completions of another model, prompts or sampling
        code, seconds = _train(command_of(run, accelerate, str(work)), work, log, environment)
        if code != 0:
            is_kept = _is_ending.is_set() and _is_resumable(work)
            lines = log.read_text(errors="replace").strip().splitlines()
            reason = next((line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "")
            error = f"exit code {code}: {reason.strip()} ({log})"
            return Row(run.arm, run.sweep, run.seed, run.settings, seconds=seconds, error=error)
        try:
            row = row_of(run, work, seconds)
            for name in ("trainer_state.json", "run_settings.json"):
                shutil.copyfile(work / name, log.with_suffix(f".{name}"))
            if sampled.exists():  # not where the model is sharded
                start.parent.mkdir(exist_ok=True)
                sampled.replace(start)
        except (OSError, KeyError, ValueError, ArithmeticError) as reason:
            error = f"it left no results ({type(reason).__name__}: {reason}, {log})"
            return Row(run.arm, run.sweep, run.seed, run.settings, seconds=seconds, error=error)
        return row
    finally:
        if not is_kept:
            shutil.rmtree(work, ignore_errors=True)


def _work_folder(folder: Path, key: str) -> Path:
    """Return the `output_dir` for a run: one that it was stopped in and can be resumed from; remove all others."""
    found = None
    for left in sorted(folder.glob(f".run-{key}-*")):
        lock = RunLock(str(left))
        if lock.acquire() is not None:  # its process outlived the study
            continue
        lock.release()
        if found is None and _is_resumable(left):
            found = left
        else:
            shutil.rmtree(left, ignore_errors=True)
    return found or Path(tempfile.mkdtemp(dir=folder, prefix=f".run-{key}-"))


def _is_resumable(work: Path) -> bool:
    """Return whether a training that did not end left a checkpoint; at its end, `train` saves its state beside."""
    return _newest_update(work) > 0 and not (work / "trainer_state.json").exists()


def _newest_update(work: Path) -> int:
    """Return the update of the newest complete checkpoint; 0 without one."""
    return max((step_of(name) for name in checkpoint_names(str(work)) if find_defect(work / name) is None), default=0)


def _train(command: list[str], work: Path, log: Path, environment: dict[str, str]) -> tuple[int, float]:
    """
    Run a command until it ends by itself, resumed whenever a signal has stopped it after a checkpoint.

    Return its last exit code, and the seconds of all its parts: of earlier calls too.
    """
    clock, done = work / "seconds.txt", -1
    seconds = float(clock.read_text()) if clock.exists() else 0.0
    code = EXIT_CODE
    with log.open("a" if _newest_update(work) else "w") as output:
        while code == EXIT_CODE and done < _newest_update(work) and not _is_ending.is_set():
            done, started = _newest_update(work), time.monotonic()
            resume = ["--resume_from_checkpoint", "true"] if done else []
            code = _run([*command, *resume], output, environment)
            seconds += time.monotonic() - started
            clock.write_text(str(seconds))
    return code, round(seconds, 1)


def _run(command: list[str], output: IO[str], environment: dict[str, str]) -> int:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
    _running.add(process)
    if _is_ending.is_set():  # it began while the others were told to end
        process.terminate()
    code = process.wait()
    _running.discard(process)
    return code
