"""
Python programs in children of one process that has imported what they need, so that none pays for the imports again.

A child runs a module or a script as `python -m module` and `python script` do: with its own arguments, environment
and working directory, and up to the functions that are registered for the end. Variables that are read at an import
and the seed of hashes are those of the tests. What is to be seen of a launcher, of an import or of the interpreter's
end takes `commands.run_command`.
"""

import atexit
import gc
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from multiprocessing import connection, context, forkserver, get_context
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from tests.helpers.commands import ROOT, calling, free_port


# Limits: of ranks beside one that failed before they are told to end, and before they are killed
PEERS_S, GRACE_S = 2, 30


def run_python(
    arguments: list[str], ranks: int = 1, cwd: Path = ROOT, timeout_s: float = 240, **env: str
) -> subprocess.CompletedProcess:
    """
    Run `-m module ...` or `script ...` and return what it printed; at the time limit, end it and fail.

    With several `ranks`, one process each, in the environment that a launcher gives them. If one fails, the others
    are ended, and the exit status is 1.
    """
    arguments = [str(argument) for argument in arguments]
    with tempfile.TemporaryDirectory() as folder:
        files = [os.path.join(folder, name) for name in ("stdout", "stderr")]
        processes = [
            _forks().Process(
                target=_run,
                args=(arguments, str(cwd), files, {**os.environ, "OMP_NUM_THREADS": "1", **env, **environment}),
            )
            for environment in _environments(ranks)
        ]
        for process in processes:
            process.start()
        is_late = _wait(processes, timeout_s)
        stdout, stderr = (Path(file).read_text(errors="replace") if os.path.exists(file) else "" for file in files)
    if is_late:
        raise AssertionError(f"{arguments} did not end in {timeout_s} s:\n{stdout}\n{stderr}")
    statuses = [process.exitcode for process in processes]
    return subprocess.CompletedProcess(arguments, statuses[0] if ranks == 1 else int(any(statuses)), stdout, stderr)


def run_function(function: Callable[..., None], *arguments, **settings) -> subprocess.CompletedProcess:
    """Run a function of a module with these arguments, as strings, as [`run_python`] runs a program."""
    return run_python(calling(function, *arguments), **settings)


def _environments(ranks: int) -> list[dict[str, str]]:
    if ranks == 1:
        return [{}]
    # Several ranks talk over gloo: on CPUs, also where the other tests train on a GPU
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks),
              "LOCAL_WORLD_SIZE": str(ranks), "CUDA_VISIBLE_DEVICES": "", "TEST_DEVICE": "cpu"}  # fmt: skip
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


@cache
def _forks() -> context.BaseContext:
    """Start the process that forks."""
    forks = get_context("forkserver")
    forks.set_forkserver_preload(["bapo_trl.script.run.train", "deepspeed", __name__])
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path}
    with patch.dict(os.environ, settings):
        forkserver.ensure_running()
    return forks


def _wait(processes: list, timeout_s: float) -> bool:
    """Wait for all ranks, and end what they leave; return whether the time was over first."""
    deadline, signals = time.monotonic() + timeout_s, [signal.SIGKILL]
    has_failed = is_late = False
    while running := [process for process in processes if process.is_alive()]:
        if not connection.wait([process.sentinel for process in running], max(0.0, deadline - time.monotonic())):
            is_late = is_late or not has_failed
            _signal(running, signals[0])
            signals, deadline = signals[1:] or signals, time.monotonic() + GRACE_S
        elif not (has_failed or is_late) and any(process.exitcode for process in processes):
            has_failed, signals = True, [signal.SIGTERM, signal.SIGKILL]
            deadline = min(deadline, time.monotonic() + PEERS_S)  # the others may end by themselves
    _signal(processes, signal.SIGKILL)  # what a program started and left
    return is_late


def _signal(processes: list, number: int) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def _run(arguments: list[str], cwd: str, files: list[str], env: dict[str, str]) -> None:
    """Run a program as this process, and end."""
    os.setpgid(0, 0)
    gc.freeze()
    for descriptor, file in enumerate(files, 1):
        with open(file, "ab") as opened:
            os.dup2(opened.fileno(), descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for draw_anew in (random.seed, np.random.seed, torch.seed):  # or all ranks would draw the same
        draw_anew()
    first, *rest = arguments
    path = env.get("PYTHONPATH", "").split(os.pathsep)
    is_module = first == "-m"
    sys.path[:0] = [cwd if is_module else os.path.dirname(os.path.abspath(first)), *filter(None, path)]
    sys.argv = rest if is_module else arguments
    try:
        if is_module:
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(first, run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()  # waits for those that run on
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # to take all modules apart costs seconds, as it copies the memory that the children share


class ForkedRun:
    """Stands for `subprocess.Popen` where a study starts a run: a process that does not need to import anything."""

    def __init__(self, command, *, stdout, stderr, env, **kwargs):
        self.command, self.files, self.env = command[1:], (stdout, stderr), env

    def wait(self) -> int:
        done = run_python(self.command, cwd=Path.cwd(), **self.env)
        for file, text in zip(self.files, (done.stdout, done.stderr), strict=True):
            file.write(text)
            file.flush()
        return done.returncode

    def terminate(self):
        """Do nothing: the reward sends the signal to all processes, like a job at its time limit."""
