"""Run the runs of a study as separate processes, several at the same time."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue

from ..checkpoints.files import checkpoint_names, find_defect, step_of
from ..checkpoints.run_lock import RunLock
from ..checkpoints.stop_signals import EXIT_CODE
from ..errors import InputError
from ..script.settings.recipes import is_true
from .results import FOLDER, Row, row_of, write_row
from .study import Run, Study, as_arguments


_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)  # `kill -9` or out of memory: the run, or a rank of its launcher
_BEFORE = "eval_completions_before.jsonl"
_ERROR_LINES = 3  # of a failed run's error output, in its row

_running: set[subprocess.Popen] = set()
_is_ending = threading.Event()  # set when the study stops: no run is started or resumed afterwards


def make_runs(study: Study, runs: Sequence[Run], folder: Path, jobs: int) -> None:
    """
    Run the given runs, `jobs` at the same time, and write a result row for each, with its error if it failed.

    A run that was stopped by a signal or killed resumes from its checkpoint: immediately if it has saved one since its
    last start, and at the next call if the study was stopped too. A run that was killed earlier has no row and keeps
    its checkpoints: the next call continues it. Output and settings of a run are kept in `logs`; its model is deleted.
    Prints a line per run that ended.
    """
    started = time.monotonic()
    free: SimpleQueue[dict[str, str]] = SimpleQueue()
    for environment in environments(study, jobs):
        free.put(environment)
    _is_ending.clear()

    def make(run: Run) -> Row | None:
        environment = free.get()
        try:
            row = _make(run, study.accelerate, folder, environment)
        finally:
            free.put(environment)
        if row is not None:
            write_row(row, folder / FOLDER / f"{run.key}.json")
        return row

    with _ending_on_sigterm(), ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(make, run): run for run in runs}
        try:
            for done, future in enumerate(as_completed(futures), start=1):
                row = future.result()
                left = (time.monotonic() - started) / done * (len(runs) - done)
                if row is None:
                    found = "killed, perhaps for its memory; the same command continues it"
                else:
                    found = f"failed: {row.error}" if row.final is None else f"{row.final:.3f}"
                    found += f", {timedelta(seconds=round(row.seconds))}"
                print(
                    f"[{done}/{len(runs)}] {futures[future].label}: {found}; "
                    f"about {timedelta(seconds=round(left))} left",
                    flush=True,
                )
        except BaseException:
            _is_ending.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(_running):
                process.terminate()
            raise


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Stop the runs too on SIGTERM, which a job receives at its time limit."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def command_of(run: Run, accelerate: str | None, output_dir: str) -> list[str]:
    """Return the command of a run: `bapo-trl train`, with an accelerate configuration if one is given."""
    launch = [] if accelerate is None else ["--accelerate_config", accelerate]
    arguments = [*as_arguments(run.flags), "--output_dir", output_dir]
    return [sys.executable, "-m", "bapo_trl", "train", *launch, *arguments]


def environments(study: Study, jobs: int) -> list[dict[str, str]]:
    """
    Return the environment variables of `jobs` simultaneous runs, each with its own GPUs and part of the CPU cores.

    A run with one process would use all GPUs, so simultaneous runs get one GPU each, shared if there are too few.
    Raises an `InputError` for more launched processes than GPUs, and for simultaneous runs on a vLLM server.
    """
    processes = study.processes()
    threads = {}
    if jobs * processes > 1:
        # Cores of this job: SLURM may give it only a part of the machine
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads["OMP_NUM_THREADS"] = str(max(1, cores // (jobs * processes)))
    environment = {**threads, **os.environ}
    if jobs == 1:
        return [environment]
    settings = [run.settings for run in study.runs()]
    if any(is_true(each.get("use_vllm", False)) and each.get("vllm_mode") == "server" for each in settings):
        raise InputError(
            f"`--jobs` is {jobs}, but the runs sample from a vLLM server (`use_vllm`), which holds the weights of "
            "only one run: set `--jobs` to 1."
        )
    devices = [] if all(is_true(each.get("use_cpu", False)) for each in settings) else _visible_devices()
    if not devices:
        return [environment] * jobs
    if processes > 1 and len(devices) < jobs * processes:
        raise InputError(
            f"`--jobs` is {jobs}, and each run takes {processes} GPUs (`accelerate` {study.accelerate}): together "
            f"{jobs * processes} GPUs, but {len(devices)} are visible. Set `--jobs` to "
            f"{max(1, len(devices) // processes)}."
        )
    places = [range(job * processes, (job + 1) * processes) for job in range(jobs)]
    named = [",".join(devices[place % len(devices)] for place in each) for each in places]
    return [{**environment, "CUDA_VISIBLE_DEVICES": names} for names in named]


def _visible_devices() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


def _make(run: Run, accelerate: str | None, folder: Path, environment: dict[str, str]) -> Row | None:
    """Return the result of a run, or `None` if it was stopped or killed before its end."""
    work, log = folder / f".run-{run.key}", folder / "logs" / f"{run.key}.log"
    start = folder / "starts" / f"seed-{run.seed}.jsonl"  # completions of the common start model: sampled once
    for parent in (log.parent, start.parent, work):
        parent.mkdir(parents=True, exist_ok=True)
    _check_lock(work)
    _begin_or_resume(work, start)
    code, seconds = _train(command_of(run, accelerate, str(work)), work, log, environment)
    if code in _KILLED or (code != 0 and _is_ending.is_set()):
        return None
    row = _harvest(Row(run.arm, run.sweep, run.seed, run.settings, seconds=seconds), run, code, work, log)
    _clean_up(row, work, start)
    return row


def _check_lock(work: Path) -> None:
    """Raise an `InputError` if another process still trains in the run's folder."""
    lock = RunLock(str(work))
    reason = lock.acquire()
    lock.release()
    if reason is not None:
        raise InputError(f"{reason} That run continued after its study was killed.")


def _begin_or_resume(work: Path, start: Path) -> None:
    """Keep the folder of a run with a checkpoint; else empty it, but for the completions of the start model."""
    if not _newest_update(work):
        shutil.rmtree(work)
        work.mkdir()
        if start.exists():
            shutil.copyfile(start, work / _BEFORE)  # `train` ignores them for another model


def _harvest(row: Row, run: Run, code: int, work: Path, log: Path) -> Row:
    """Return the row of a run that has ended with its results or its error; keep its log and its settings."""
    if code != 0:
        lines = filter(None, map(str.strip, _error_output(log).read_text(errors="replace").splitlines()))
        row = replace(row, error=f"exit code {code}: {' | '.join([*lines][-_ERROR_LINES:])} ({_error_output(log)})")
    else:
        try:
            row = row_of(run, work, row.seconds)
            for name in ("trainer_state.json", "run_settings.json"):
                shutil.copyfile(work / name, log.with_suffix(f".{name}"))
        except (OSError, KeyError, ValueError) as error:
            row = replace(row, error=f"no results can be read ({type(error).__name__}: {error}, {log})")
    for secret in run.secrets if row.error is not None else ():
        row = replace(row, error=row.error.replace(secret, "<secret>"))
    return row


def _clean_up(row: Row, work: Path, start: Path) -> None:
    """Delete the folder of a run, but for the completions of the start model if it did not fail."""
    if row.error is None and (work / _BEFORE).exists():  # it does not exist for sharded models
        (work / _BEFORE).replace(start)
    shutil.rmtree(work, ignore_errors=True)


def _error_output(log: Path) -> Path:
    """Return the file of what a run writes on stderr, beside the log of its stdout."""
    return log.with_suffix(".err")


def _newest_update(work: Path) -> int:
    """Return the step of the newest complete checkpoint, or 0 if there is none."""
    return max((step_of(name) for name in checkpoint_names(str(work)) if find_defect(work / name) is None), default=0)


def _train(command: list[str], work: Path, log: Path, environment: dict[str, str]) -> tuple[int, float]:
    """
    Run a command, and resume it whenever it was stopped by a signal or killed after a new checkpoint.

    Return its last exit code, and its total seconds, including earlier calls.
    """
    clock, done = work / "seconds.txt", -1
    seconds = float(clock.read_text()) if clock.exists() else 0.0
    code = EXIT_CODE
    mode = "a" if _newest_update(work) else "w"
    with log.open(mode) as output, _error_output(log).open(mode) as errors:
        while code in (EXIT_CODE, *_KILLED) and done < _newest_update(work) and not _is_ending.is_set():
            done, started = _newest_update(work), time.monotonic()
            resume = ["--resume_from_checkpoint", "true"] if done else []
            process = subprocess.Popen(
                [*command, *resume], stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env=environment
            )
            _running.add(process)
            if _is_ending.is_set():  # the process started while the others were being terminated
                process.terminate()
            code = process.wait()
            _running.discard(process)
            seconds += time.monotonic() - started
            clock.write_text(str(seconds))
    return code, round(seconds, 1)
