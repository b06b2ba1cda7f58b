"""TRL's default vLLM mode, colocate, with vLLM's real engine on a CPU. Sleep mode is not to be had there."""

import json
import statistics
from pathlib import Path
from unittest.mock import patch

import pytest
from safetensors.torch import load_file

from benchmarks.tiny_model import MODEL_SETTINGS
from benchmarks.warm_start import warm_start_path
from tests.helpers.alike import TIMES, assert_same_tensors
from tests.helpers.commands import succeeded
from tests.helpers.forked import run_python
from tests.helpers.ranks import read_ranks


REPLAY_AND_PARTIAL_ROLLOUTS = {
    "replay_capacity": 256, "replay_fraction": 0.5, "replay_max_staleness": 16, "partial_rollout_oversampling": 1.5,
    "partial_rollout_chunk_length": 1, "max_steps": 12, "save_strategy": "steps", "save_steps": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> str:
    with patch.dict(MODEL_SETTINGS, {"hidden_size": 128}):  # vLLM's attention on CPUs needs heads of 32 or more
        return str(warm_start_path())


def run(folder: Path, **settings) -> dict:
    """Train, see that nothing is left to complain of at the end, and return what the worker found."""
    folder.mkdir()
    result = run_python(["-m", "tests.e2e.colocate_worker", folder, json.dumps(settings)])
    succeeded(result)
    assert "Traceback" not in result.stderr
    return read_ranks(folder, 1)[0]


def without_times(logs: list[dict]) -> list[dict]:
    return [{name: value for name, value in log.items() if name not in TIMES} for log in logs]


def test_each_token_is_scored_by_its_policy_and_a_resumed_run_is_equal(model, tmp_path):
    straight = run(tmp_path / "straight", model=model, **REPLAY_AND_PARTIAL_ROLLOUTS)
    assert straight["log_prob_difference"] < 1e-4
    assert straight["rows_of_several_versions"] > 0.1 * straight["rows"]
    assert max(log["ratio/max"] for log in straight["logs"]) > 1.5  # the weights did change
    assert max(log.get("replay/fraction", 0) for log in straight["logs"]) == 0.5

    checkpoint = str(tmp_path / "straight" / "checkpoint-8")
    resumed = run(tmp_path / "resumed", model=model, resume=checkpoint, **REPLAY_AND_PARTIAL_ROLLOUTS)
    assert without_times(resumed["logs"]) == without_times(straight["logs"])
    assert_same_tensors(
        load_file(tmp_path / "resumed" / "weights.safetensors"),
        load_file(tmp_path / "straight" / "weights.safetensors"),
    )


def test_an_adapter_learns_as_with_the_sampler_of_transformers(model, tmp_path):
    settings = {"model": model, "uses_lora": True, "max_steps": 48, "learning_rate": 2e-3}
    rewards = {}
    for uses_vllm in (True, False):
        logs = run(tmp_path / str(uses_vllm), uses_vllm=uses_vllm, **settings)["logs"]
        generations = [log for log in logs if "reward" in log]
        rewards[uses_vllm] = [log["reward"] for log in generations]
        assert statistics.mean(rewards[uses_vllm][-4:]) > rewards[uses_vllm][0] + 0.1
        # Its own arithmetic is in bfloat16, as the trainer's
        assert all(log.get("sampling/sampling_logp_difference/mean", 0) < 0.02 for log in generations)
    assert statistics.mean(rewards[True]) == pytest.approx(statistics.mean(rewards[False]), abs=0.08)
