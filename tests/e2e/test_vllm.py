"""Training over a live vLLM server on the CPU: the samples come from the trainer's own weights, always."""

import json
import statistics
import sys
import urllib.request
from unittest.mock import patch

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bapo_trl.tasks import load_task, warm_start_path
from bapo_trl.tasks.model import MODEL_SETTINGS
from bapo_trl.vllm_cpu.client import GlooVLLMClient
from tests.commands import run_command
from tests.e2e.launching import free_port, launch, vllm_server


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def server(request, tmp_path_factory):
    """Port of a server, and the folder of the model that it was started with."""
    # vLLM's attention on CPUs needs heads of 32 or more
    servable = {"head_dim": 32, "tie_word_embeddings": request.param}
    with patch.dict(MODEL_SETTINGS, servable):
        model = warm_start_path()
    folder = tmp_path_factory.mktemp("server")
    with vllm_server(model, folder / "server.log") as port:
        yield port, model


def settings_for(server, **settings) -> str:
    port, model = server
    return json.dumps({"model": str(model), "vllm_server_port": port, "vllm_group_port": free_port(), **settings})


def log_probs_of_server(port: int, sequences: list[list[int]]) -> list[list[float]]:
    """Ask the server for the log-probabilities of all tokens but the first of each sequence."""
    rows = []
    for sequence in sequences:
        body = {"prompt": sequence, "max_tokens": 1, "prompt_logprobs": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            positions = json.load(answer)["choices"][0]["prompt_logprobs"][1:]
        rows.append([position[str(token)]["logprob"] for position, token in zip(positions, sequence[1:], strict=True)])
    return rows


def assert_server_has(port: int, model, tokenizer) -> None:
    problems = load_task().test_dataset.select(range(8))
    sequences = [tokenizer(f"{row['prompt']}{row['answer']}")["input_ids"] for row in problems]
    for sequence, served in zip(sequences, log_probs_of_server(port, sequences), strict=True):
        with torch.no_grad():
            logps = model(torch.tensor([sequence])).logits[0, :-1].log_softmax(-1)
        own = logps.gather(1, torch.tensor(sequence[1:]).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(torch.tensor(served), own, rtol=0, atol=2e-5)


@pytest.mark.parametrize("num_processes", [2, 3])
def test_zero3_trainers_learn_and_the_server_always_has_their_weights(tmp_path, server, num_processes):
    port, start = server
    launch(
        "cpu_zero3", ["-m", "tests.e2e.vllm_worker", str(tmp_path), settings_for(server, max_steps=30)], num_processes
    )
    result = json.loads((tmp_path / "rank-0.json").read_text())
    assert result["num_processes"] == num_processes
    assert (result["engine"], result["sharding"]) == ("DeepSpeedEngine", "DeepSpeedZeroOptimizer_Stage3")
    logs = result["logs"]
    assert len(logs) == 30
    generations = [log for log in logs if "reward" in log]
    assert max(log["sampling/sampling_logp_difference/max"] for log in generations) < 1e-5
    for log in generations:
        assert log["sampling/raw_importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-4)
        assert log["sampling/masked_share"] == log["sampling/truncated_share"] == 0
    rewards = [log["reward"] for log in generations]
    assert statistics.mean(rewards[-2:]) > statistics.mean(rewards[:2]) + 0.03
    assert max(log["ratio/max"] for log in logs) > 1.1  # off-policy, so the weights did change
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    tokenizer = AutoTokenizer.from_pretrained(start)
    assert_server_has(port, model, tokenizer)
    with pytest.raises(AssertionError):  # and no longer those that it started with
        assert_server_has(port, AutoModelForCausalLM.from_pretrained(start), tokenizer)


def test_lora_adapters_reach_the_server_merged(tmp_path, server):
    port, start = server
    settings = settings_for(server, max_steps=8, uses_lora=True, learning_rate=5e-3)
    launch("cpu_zero3", ["-m", "tests.e2e.vllm_worker", str(tmp_path), settings])
    logs = json.loads((tmp_path / "rank-0.json").read_text())["logs"]
    assert max(log["sampling/sampling_logp_difference/max"] for log in logs if "reward" in log) < 1e-5
    assert max(log["ratio/max"] for log in logs) > 1.1
    assert not (tmp_path / "final" / "model.safetensors").exists()
    base = AutoModelForCausalLM.from_pretrained(start)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "final").merge_and_unload()
    assert_server_has(port, model, AutoTokenizer.from_pretrained(start))


def test_a_server_with_other_weights_stops_the_training(tmp_path, server):
    settings = settings_for(server, max_steps=12, is_deaf=True, learning_rate=1e-2)
    result = run_command([sys.executable, "-m", "tests.e2e.vllm_worker", str(tmp_path), settings])
    assert result.returncode != 0
    assert "nats a token on the samples just drawn, on average; `vllm_logp_tolerance` is 0.1" in result.stderr
    assert "server's weights are not the trainer's" in result.stderr


@pytest.mark.parametrize("config", [None, {"backend": "nccl"}])
def test_a_server_that_cannot_send_over_gloo_is_refused(config):
    class Client(GlooVLLMClient):
        def __init__(self):
            self.base_url = "http://127.0.0.1:1"

        def get_server_info(self):
            return {"weight_transfer_config": config}

    with pytest.raises(RuntimeError, match=r"127.0.0.1:1 transfers weights by (None|'nccl').*serve_vllm.sh"):
        Client().init_communicator("cpu")
