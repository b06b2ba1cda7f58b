"""Asynchronous training on two ranks: a vLLM server, the rollout worker of TRL, an environment, live weights."""

import json
import statistics
from unittest.mock import patch

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.tiny_model import MODEL_SETTINGS
from benchmarks.warm_start import warm_start_path
from tests.e2e.launching import ENGINES, SMALL, fork, vllm_server
from tests.e2e.test_vllm import assert_server_has
from tests.helpers.commands import free_port
from tests.helpers.ranks import read_ranks


UPDATES = 60


def test_the_reward_rises_while_rollouts_go_on(tmp_path):
    with patch.dict(MODEL_SETTINGS, {"hidden_size": 128}):  # vLLM's attention on CPUs needs heads of 32 or more
        model = warm_start_path()
    # So few that no step splits a prompt: with a seed, as TRL's worker sends, vLLM 0.31 then fails on a CPU
    flags = (*SMALL, "--max-num-seqs", "64")
    with vllm_server(model, tmp_path / "server.log", flags=flags) as server:
        settings = {
            "model": str(model), "vllm_server_base_url": f"http://127.0.0.1:{server.port}", "port": free_port(),
            "per_device_train_batch_size": 32, "num_generations": 8, "max_completion_length": 4, "token_budget": 0,
            "max_tool_calling_iterations": 1, "learning_rate": 5e-4, "max_steps": UPDATES, "logging_steps": 1,
        }  # fmt: skip
        fork("cpu_ddp", ["-m", "tests.e2e.async_worker", str(tmp_path), json.dumps(settings)])
        tokenizer = AutoTokenizer.from_pretrained(model)
        assert_server_has(server.port, AutoModelForCausalLM.from_pretrained(tmp_path / "final"), tokenizer)
    logs = read_ranks(tmp_path, 2, **ENGINES["cpu_ddp"])[0]["logs"]
    assert len(logs) == UPDATES
    followed = [log["sampling/server_followed"] for log in logs if "sampling/server_followed" in log]
    assert len(followed) >= 10
    assert followed == pytest.approx([1] * len(followed), abs=0.02)
    fresh = [log for log in logs if log["sample/staleness_max"] == 0]
    assert fresh
    assert all(abs(log["ratio/max"] - 1) < 1e-4 for log in fresh)
    assert max(log["sample/staleness_max"] for log in logs) >= 1
    assert max(log["ratio/max"] for log in logs) > 1.1
    assert len({log["bapo/clip_high"] for log in logs}) > 1
    assert sum(log.get("tools/check/call_total", 0) for log in logs) > 1000
    rewards = [log["reward"] for log in logs]
    assert statistics.mean(rewards[-10:]) > statistics.mean(rewards[:10]) + 0.05
