"""A real chat model behind a live vLLM server: LoRA trains on samples of its own weights."""

import json
import sys

import pytest

from bapo_trl.tasks import load_chat_sums, smollm2_path
from tests.e2e.launching import vllm_server
from tests.helpers.commands import ROOT, free_port, run_command, succeeded


@pytest.fixture(scope="module")
def model():
    try:
        return smollm2_path()
    except ImportError as error:  # `make test-llm` has what fetches it
        pytest.skip(str(error))


def test_lora_trains_and_is_evaluated_over_the_server(tmp_path, model):
    problems = tmp_path / "problems.jsonl"
    problems.write_text("\n".join(map(json.dumps, load_chat_sums().test_dataset.select(range(4)))))
    sizes = ("--max-model-len", "96", "--kv-cache-memory-bytes", str(256 * 2**20))
    server_log = tmp_path / "server.log"
    with vllm_server(model, server_log, flags=sizes) as server:
        settings = {
            "model_name_or_path": model, "output_dir": tmp_path / "run", "use_vllm": True, "vllm_mode": "server",
            "vllm_server_port": server.port, "vllm_group_port": free_port(), "bf16": False, "max_steps": 8,
            "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8, "logging_steps": 1,
            "save_strategy": "no", "reward_funcs": "tests.helpers.toy.brevity",
            "eval_dataset": problems, "num_generations_eval": 2, "per_device_eval_batch_size": 8,
        }  # fmt: skip
        command = [sys.executable, "train_bapo.py", "--config", "recipes/smollm2_sums.yaml"]
        succeeded(run_command([*command, *(f"--{name}={value}" for name, value in settings.items())], cwd=ROOT))
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    generations = [log for log in state["log_history"] if "sampling/sampling_logp_difference/max" in log]
    assert [log["step"] for log in generations] == [1, 5]
    for log in generations:  # float32 over 30 layers, by other kernels
        assert log["sampling/sampling_logp_difference/mean"] < 1e-4
        assert log["sampling/sampling_logp_difference/max"] < 1e-3
    assert generations[1]["sampling/server_followed"] == pytest.approx(1, abs=0.02)
    # Before, two generations, after: the server gets the weights for each, and samples
    requests = server_log.read_text()
    assert requests.count('"POST /update_weights HTTP') == 4
    assert requests.count('"POST /v1/completions HTTP') >= 4
    found = json.loads((tmp_path / "run" / "eval_results.json").read_text())
    for prefix, name in (("before", "eval_completions_before"), ("eval", "eval_completions")):
        lines = [json.loads(line) for line in (tmp_path / "run" / f"{name}.jsonl").read_text().splitlines()]
        assert [(line["prompt_index"], line["number"]) for line in lines] == [(p, n) for p in range(4) for n in (0, 1)]
        assert found[f"{prefix}_avg@2"] == sum(line["correct"] for line in lines) / 8
