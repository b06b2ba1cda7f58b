"""Run commands in the tests, such that nothing they start outlives them."""

import os
import signal
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import SystemRandom

import pytest


ROOT = Path(__file__).resolve().parents[2]


def run_command(
    command: list[str], cwd: Path = ROOT, timeout_s: float = 240, **env: str
) -> subprocess.CompletedProcess:
    """Run a command and return what it printed; at the time limit, end it with all its children and fail."""
    settings = {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}  # the second says where a process aborts
    process = subprocess.Popen(
        command, cwd=cwd, env={**os.environ, **settings, **env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        raise AssertionError(f"{command} did not end in {timeout_s} s:\n{stdout}\n{stderr}") from None
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def succeeded(result: subprocess.CompletedProcess) -> str:
    """Return what a command printed, or fail with it."""
    assert result.returncode == 0, (result.stdout + result.stderr)[-8000:]
    return result.stdout


def ends(main, arguments: list, code: int = 2) -> None:
    """See that a command ends at once, with this exit code."""
    with pytest.raises(SystemExit) as ended:
        main([*map(str, arguments)])
    assert (ended.value.code or 0) == code


def tracked_files(*patterns: str) -> list[Path]:
    """Return the files of the repository that match patterns of `git ls-files`."""
    names = subprocess.check_output(["git", "ls-files", *patterns], cwd=ROOT, text=True).splitlines()
    return [ROOT / name for name in names]


def calling(function: Callable[..., None], *arguments: object) -> list[str]:
    """Return the arguments of Python that call a function of a module, with arguments as strings."""
    return ["-m", "tests.helpers.call", function.__module__, function.__qualname__, *map(str, arguments)]


def accelerate_launcher(config: str, num_processes: int = 2) -> list[str]:
    """Return the arguments of Python that launch a script in processes, by one of `accelerate_configs/`."""
    path = ROOT / "accelerate_configs" / f"{config}.yaml"
    return ["-m", "accelerate.commands.launch", "--config_file", str(path), "--num_processes", str(num_processes)]


def free_port() -> int:
    """
    Return a port of the loopback interface that nothing listens on.

    It is below those that the system gives to sockets that name none, so that none of these takes it meanwhile.
    """
    while True:
        port = SystemRandom().randrange(10_000, 32_768)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
