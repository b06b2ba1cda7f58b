"""
Python programs in children of one process that has imported what they need, so that none pays for the imports again.

A child runs a module or a script as `python -m module` and `python script` do: with its own arguments, environment
and working directory, and up to the functions that are registered for the end. Variables that are read at an import
and the seed of hashes are those of the tests. What is to be seen of a launcher, of an import or of the interpreter's
end takes `commands.run_command`.
"""

import atexit
import gc
import json
import os
import random
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from tests.helpers.commands import ROOT, free_port


# Limits: of all imports, of ranks beside one that failed before they are told to end, and before they are killed
IMPORT_S, PEERS_S, GRACE_S = 300, 2, 30
IMPORTED = ("bapo_trl.script.training", "deepspeed")


def run_python(
    arguments: list[str], ranks: int = 1, cwd: Path = ROOT, timeout_s: float = 240, **env: str
) -> subprocess.CompletedProcess:
    """
    Run `-m module ...` or `script ...` and return what it printed; at the time limit, end it and fail.

    With several `ranks`, one process each, in the environment that a launcher gives them. If one fails, the others
    are ended, and the exit status is 1.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [os.path.join(folder, name) for name in ("stdout", "stderr")]
        program = {
            "arguments": [str(argument) for argument in arguments], "cwd": str(cwd), "files": files,
            "env": {**os.environ, "OMP_NUM_THREADS": "1", **env}, "ranks": _environments(ranks),
        }  # fmt: skip
        statuses = _parent().run(program, timeout_s)
        stdout, stderr = (Path(file).read_text(errors="replace") for file in files)
    if statuses is None:
        raise AssertionError(f"{arguments} did not end in {timeout_s} s:\n{stdout}\n{stderr}")
    status = statuses[0] if ranks == 1 else int(any(statuses))
    return subprocess.CompletedProcess(arguments, status, stdout, stderr)


def _environments(ranks: int) -> list[dict[str, str]]:
    if ranks == 1:
        return [{}]
    # Several ranks talk over gloo: on CPUs, also where the other tests train on a GPU
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks),
              "LOCAL_WORLD_SIZE": str(ranks), "CUDA_VISIBLE_DEVICES": "", "TEST_DEVICE": "cpu"}  # fmt: skip
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


class _Parent:
    """The process that forks, seen from the tests: one line of JSON for each program, each start and each end."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.forked"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )  # fmt: skip
        atexit.register(self._end)
        assert self._has_answer(time.monotonic() + IMPORT_S), f"the imports took more than {IMPORT_S} s"
        self._answer()

    def run(self, program: dict, timeout_s: float) -> list[int] | None:
        """Return the exit status of each rank, `None` if the time was over first."""
        self._process.stdin.write(json.dumps(program).encode() + b"\n")
        self._process.stdin.flush()
        pids = self._answer()
        deadline = time.monotonic() + timeout_s
        statuses: dict[int, int] = {}
        is_late, then = False, [signal.SIGKILL]
        while len(statuses) < len(pids):
            if not self._has_answer(deadline):
                is_late = is_late or not any(statuses.values())
                self._signal(pids, statuses, then[0])
                then, deadline = then[1:] or then, time.monotonic() + GRACE_S
                continue
            pid, status = self._answer()
            if status and not is_late and not any(statuses.values()):  # the others may end by themselves
                then, deadline = [signal.SIGTERM, signal.SIGKILL], min(deadline, time.monotonic() + PEERS_S)
            statuses[pid] = status
        for pid in pids:  # what a program started and left
            self._signal_group(pid, signal.SIGKILL)
        return None if is_late else [statuses[pid] for pid in pids]

    def _signal(self, pids: list[int], statuses: dict[int, int], number: int) -> None:
        for pid in pids:
            if pid not in statuses:
                self._signal_group(pid, number)

    def _signal_group(self, pid: int, number: int) -> None:
        try:
            os.killpg(pid, number)
        except ProcessLookupError:
            return

    def _has_answer(self, deadline: float) -> bool:
        return bool(select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0])

    def _answer(self):
        answer = os.read(self._process.stdout.fileno(), _ANSWER)
        assert answer, f"the process that forks ended with {self._process.wait()}"
        return json.loads(answer)

    def _end(self) -> None:
        self._process.stdin.close()
        self._process.wait()


@cache
def _parent() -> _Parent:
    return _Parent()


_ANSWER = 256
"""Bytes of an answer: they are of one length, so that each read takes one."""


def _fork_programs() -> dict:
    """Fork for each program that standard input names; return in the children alone, with the program."""
    requests, answers = os.fdopen(os.dup(0)), os.dup(1)
    with open(os.devnull, "r+b") as null:
        os.dup2(null.fileno(), 0)
        os.dup2(null.fileno(), 1)
    for module in IMPORTED:
        if find_spec(module):
            import_module(module)
    gc.freeze()
    _tell(answers, [])
    for line in requests:
        program = json.loads(line)
        pids = []
        for environment in program["ranks"]:
            pid = os.fork()
            if pid == 0:
                os.close(answers)
                requests.close()
                return {**program, "env": {**program["env"], **environment}}
            os.setpgid(pid, pid)  # here and in the child: whichever comes first
            pids.append(pid)
        _tell(answers, pids)
        for _ in pids:
            pid, status = os.wait()
            _tell(answers, [pid, os.waitstatus_to_exitcode(status)])
    sys.exit()


def _tell(answers: int, message: list) -> None:
    os.write(answers, json.dumps(message).encode().ljust(_ANSWER))


def _run(program: dict) -> None:
    """Run a program as this process, and end."""
    os.setpgid(0, 0)
    for descriptor, file in enumerate(program["files"], 1):
        with open(file, "ab") as opened:
            os.dup2(opened.fileno(), descriptor)
    os.chdir(program["cwd"])
    os.environ.clear()
    os.environ.update(program["env"])
    for draw_anew in (random.seed, np.random.seed, torch.seed):  # or all ranks would draw the same
        draw_anew()
    first, *rest = program["arguments"]
    path = program["env"].get("PYTHONPATH", "").split(os.pathsep)
    is_module = first == "-m"
    sys.path[:0] = [program["cwd"] if is_module else os.path.dirname(os.path.abspath(first)), *filter(None, path)]
    sys.argv = rest if is_module else [first, *rest]
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


if __name__ == "__main__":
    _run(_fork_programs())
