"""Start trainers with `accelerate launch` and the repository's own configs, and vLLM servers with `bapo-trl serve`."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.helpers.commands import ROOT, accelerate_launcher, free_port, run_command, succeeded
from tests.helpers.forked import run_python


# What a run says of itself, by the config that launched it: the exit code alone would not tell a silent fallback.
ENGINES = {
    "cpu_ddp": {"distributed_type": "MULTI_CPU", "engine": "DistributedDataParallel"},
    "cpu_zero3": {
        "distributed_type": "DEEPSPEED", "engine": "DeepSpeedEngine", "sharding": "DeepSpeedZeroOptimizer_Stage3",
    },
}  # fmt: skip


# Settings by which the embedded task is learned in some 50 updates
LEARNS = {
    "per_device_train_batch_size": 64, "gradient_accumulation_steps": 1, "steps_per_generation": 4,
    "num_generations": 8, "max_completion_length": 4, "learning_rate": 5e-4, "lr_scheduler_type": "constant",
    "logging_steps": 1,
}  # fmt: skip
START_S = 300  # the longest that a server may take to start
SMALL = ("--max-model-len", "64", "--kv-cache-memory-bytes", str(64 * 2**20))


class Server(NamedTuple):
    port: int
    process: int  # its number is that of its group's


def launch(config: str, arguments: list[str], num_processes: int = 2, timeout_s: float = 400) -> str:
    """Run `accelerate launch` with one of `accelerate_configs/`; return what it printed, or fail."""
    command = [sys.executable, *accelerate_launcher(config, num_processes), *arguments]
    return succeeded(run_command(command, timeout_s=timeout_s))


def fork(config: str, arguments: list[str], num_processes: int = 2, timeout_s: float = 400) -> str:
    """Do the same in the environment that `accelerate launch` makes, and without its imports on each rank."""
    return succeeded(run_ranks(config, arguments, num_processes, timeout_s))


def run_ranks(
    config: str, arguments: list[str], num_processes: int = 2, timeout_s: float = 400
) -> subprocess.CompletedProcess:
    """Run a program on ranks in the environment that `accelerate launch` makes."""
    return run_python(arguments, num_processes, timeout_s=timeout_s, **_environment(config))


@cache
def _environment(config: str) -> dict[str, str]:
    """Return what `accelerate launch` tells its ranks, other than which they are: what it tells `env`."""
    printed = succeeded(run_command([sys.executable, *accelerate_launcher(config), "--no_python", "env"]))
    variables = [line.partition("=") for line in printed.splitlines() if line.startswith("ACCELERATE_")]
    return {name: value for name, _, value in variables}


@contextmanager
def vllm_server(model: Path, log: Path, port: int | None = None, flags: Sequence[str] = SMALL) -> Iterator[Server]:
    """Serve a model with `bapo-trl serve`; say where once it says that it is ready, end it afterwards."""
    port = port or free_port()
    command = [sys.executable, "-m", "bapo_trl", "serve", "--model", str(model)]
    process = subprocess.Popen(
        [*command, "--device", "cpu", "--port", str(port), *flags], cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    lines: list[str] = []
    limit = threading.Timer(START_S, os.killpg, (process.pid, signal.SIGKILL))  # which ends its output, too
    limit.start()
    try:
        for line in process.stdout:
            lines.append(line)
            if "Application startup complete" in line:
                break
        else:
            raise AssertionError(f"The server did not start, for {START_S} s or at all:\n" + "".join(lines[-60:]))
        limit.cancel()
        drain = threading.Thread(target=lambda: lines.extend(process.stdout), daemon=True)  # it must not block on us
        drain.start()
        yield Server(port, process.pid)
    finally:
        limit.cancel()
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.write_text("".join(lines))
