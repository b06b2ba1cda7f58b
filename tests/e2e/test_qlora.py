"""A base model in 4 or 8 bits with an adapter, over vLLM's real engine, which gets the sum in full weights."""

import statistics

import pytest
from safetensors.torch import load_file

from tests.e2e.test_colocate import REPLAY_AND_PARTIAL_ROLLOUTS, model, run, without_times  # noqa: F401
from tests.helpers.alike import assert_same_tensors


NF4 = {
    "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_use_double_quant": True,
}  # fmt: skip


def assert_has_the_adapter(engine: dict) -> None:
    assert engine["share"] == pytest.approx(1, abs=0.01)
    assert engine["quantization"] is None


def test_it_learns_as_with_the_sampler_of_transformers(model, tmp_path):  # noqa: F811
    settings = {"model": model, "uses_lora": True, "quantization": NF4, "max_steps": 48, "learning_rate": 2e-3}
    rewards = {}
    for uses_vllm in (True, False):
        found = run(tmp_path / str(uses_vllm), uses_vllm=uses_vllm, **settings)
        generations = [log for log in found["logs"] if "reward" in log]
        rewards[uses_vllm] = [log["reward"] for log in generations]
        assert statistics.mean(rewards[uses_vllm][-4:]) > rewards[uses_vllm][0] + 0.1
        assert all(log.get("sampling/sampling_logp_difference/mean", 0) < 0.02 for log in generations)
        if uses_vllm:
            assert_has_the_adapter(found["engine"])
            assert found["engine"]["steps"] <= 1  # of bfloat16, from dequantized weight and adapter: rounded once
    assert statistics.mean(rewards[True]) == pytest.approx(statistics.mean(rewards[False]), abs=0.08)


def test_with_replay_and_partial_rollouts_a_resumed_run_is_equal(model, tmp_path):  # noqa: F811
    settings = {"model": model, "uses_lora": True, "quantization": NF4, **REPLAY_AND_PARTIAL_ROLLOUTS}
    straight = run(tmp_path / "straight", **settings)
    assert straight["rows_of_several_versions"] > 0
    resumed = run(tmp_path / "resumed", resume=str(tmp_path / "straight" / "checkpoint-8"), **settings)
    assert without_times(resumed["logs"]) == without_times(straight["logs"])
    assert_same_tensors(
        load_file(tmp_path / "resumed" / "weights.safetensors"),
        load_file(tmp_path / "straight" / "weights.safetensors"),
    )


def test_in_8_bits(model, tmp_path):  # noqa: F811
    settings = {"uses_lora": True, "quantization": {"load_in_8bit": True}, "max_steps": 8, "learning_rate": 2e-3}
    assert_has_the_adapter(run(tmp_path / "run", model=model, **settings)["engine"])
