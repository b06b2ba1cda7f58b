"""Start trainers with `accelerate launch` and the repository's own configs, and vLLM servers with its script."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.helpers.commands import ROOT, accelerate_launcher, free_port, run_command


# What a run says of itself, by the config that launched it: the exit code alone would not tell a silent fallback.
ENGINES = {
    "cpu_ddp": {"distributed_type": "MULTI_CPU", "engine": "DistributedDataParallel"},
    "cpu_zero3": {
        "distributed_type": "DEEPSPEED", "engine": "DeepSpeedEngine", "sharding": "DeepSpeedZeroOptimizer_Stage3",
    },
}  # fmt: skip


class Server(NamedTuple):
    port: int
    process: int  # its number is that of its group's


def launch(config: str, arguments: list[str], num_processes: int = 2, timeout_s: float = 400) -> str:
    """Run `accelerate launch` with one of `accelerate_configs/`; return what it printed, or fail."""
    command = [sys.executable, *accelerate_launcher(config, num_processes), *arguments]
    result = run_command(command, timeout_s=timeout_s)
    output = result.stdout + result.stderr
    assert result.returncode == 0, output[-8000:]
    return output


@contextmanager
def vllm_server(
    model: Path,
    log: Path,
    timeout_s: int = 300,
    port: int | None = None,
    max_tokens: int = 64,
    cache_mib: int = 64,
    max_rows: int = 128,
) -> Iterator[Server]:
    """Serve a model with `scripts/serve_vllm.sh`; say where once it says that it is ready, end it afterwards."""
    port = port or free_port()
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "DEVICE": "cpu",
        "SERVE_PORT": str(port),
        "TIMEOUT": str(timeout_s),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    flags = ["--max-model-len", str(max_tokens), "--kv-cache-memory-bytes", str(cache_mib * 2**20)]
    flags += ["--max-num-seqs", str(max_rows)]
    process = subprocess.Popen(
        ["scripts/serve_vllm.sh", str(model), *flags],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    lines: list[str] = []
    try:
        for line in process.stdout:
            lines.append(line)
            if line.startswith("vLLM serves"):
                break
        else:
            raise AssertionError("The server did not start:\n" + "".join(lines[-60:]))
        drain = threading.Thread(target=lambda: lines.extend(process.stdout), daemon=True)  # it must not block on us
        drain.start()
        yield Server(port, process.pid)
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.write_text("".join(lines))
