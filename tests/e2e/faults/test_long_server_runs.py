"""A long run over a live server: neither the trainer nor the server holds more with time."""

import json
import sys
from unittest.mock import patch

from benchmarks.tiny_model import MODEL_SETTINGS
from benchmarks.warm_start import warm_start_path
from tests.e2e.launching import vllm_server
from tests.helpers.commands import free_port, run_command, succeeded
from tests.helpers.fault_counts import cases
from tests.helpers.long_run import assert_nothing_grows


def test_a_long_run_over_a_server_does_not_grow(tmp_path, monkeypatch):
    updates = cases(300)
    # oneDNN keeps what it compiled for each size of a batch, up to 1,024 of them: 0.2 GB in 600 updates
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "8")
    with patch.dict(MODEL_SETTINGS, {"hidden_size": 128}):  # vLLM's attention on CPUs needs heads of 32 or more
        model = warm_start_path()
    with vllm_server(model, tmp_path / "server.log") as server:
        ports = {"vllm_server_port": server.port, "vllm_group_port": free_port()}
        settings = {"model": str(model), "server": server.process, "max_steps": updates, **ports}
        command = [sys.executable, "-m", "tests.e2e.faults.long_run_worker", str(tmp_path), json.dumps(settings)]
        succeeded(run_command(command, timeout_s=1800))
    assert_nothing_grows(tmp_path / "measurements.jsonl", updates, updates // 3, num_bins=10)
