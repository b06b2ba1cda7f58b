"""A real chat model behind a live vLLM server: LoRA trains on samples of its own weights."""

import json
import sys

import pytest

from bapo_trl.tasks import smollm2_path
from tests.e2e.launching import vllm_server
from tests.helpers.commands import ROOT, free_port, run_command


@pytest.fixture(scope="module")
def model():
    try:
        return smollm2_path()
    except ImportError as error:  # `make test-llm` has what fetches it
        pytest.skip(str(error))


def test_lora_trains_a_chat_model_over_the_server(tmp_path, model):
    sizes = ("--max-model-len", "96", "--kv-cache-memory-bytes", str(256 * 2**20))
    with vllm_server(model, tmp_path / "server.log", flags=sizes) as server:
        settings = {
            "model_name_or_path": model, "output_dir": tmp_path / "run", "use_vllm": True, "vllm_mode": "server",
            "vllm_server_port": server.port, "vllm_group_port": free_port(), "bf16": False, "max_steps": 8,
            "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8, "logging_steps": 1,
            "save_strategy": "no", "reward_funcs": "tests.helpers.toy.brevity",
        }  # fmt: skip
        command = [sys.executable, "train_bapo.py", "--config", "recipes/smollm2_sums.yaml"]
        result = run_command([*command, *(f"--{name}={value}" for name, value in settings.items())], cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    generations = [log for log in state["log_history"] if "sampling/sampling_logp_difference/max" in log]
    assert [log["step"] for log in generations] == [1, 5]
    for log in generations:  # float32 over 30 layers, by other kernels
        assert log["sampling/sampling_logp_difference/mean"] < 1e-4
        assert log["sampling/sampling_logp_difference/max"] < 1e-3
    assert generations[1]["sampling/server_followed"] == pytest.approx(1, abs=0.02)
