"""Training over a live vLLM server on the CPU: the samples come from the trainer's own weights, always."""

import json
import statistics
import urllib.request
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import peft
import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation

from bapo_trl import BAPOConfig, BAPOTrainer, StaleServerError, check_server_weights
from bapo_trl.tasks import character_tokenizer, load_task
from bapo_trl.vllm_server.quantized import prepare_quantized
from bapo_trl_gloo.client import GlooClient, GlooVLLMClient
from benchmarks.tiny_model import MODEL_SETTINGS, tiny_model
from benchmarks.warm_start import warm_start_path
from tests.e2e.launching import ENGINES, LEARNS, fork, launch, run_ranks, vllm_server
from tests.helpers.commands import calling, free_port, succeeded
from tests.helpers.forked import run_function, run_python
from tests.helpers.ranks import finish, read_ranks
from tests.helpers.toy import CPU, OVER_SERVER, digits_reward


class Deaf(BAPOTrainer):
    """The server never hears of new weights after the first ones, and nothing says so."""

    def _generate_single_turn(self, *args, **kwargs):
        if self.state.global_step > 0:
            self._last_loaded_step = self.state.global_step
        return super()._generate_single_turn(*args, **kwargs)


def train_on_a_rank(out: str, settings: str) -> None:
    """Train the embedded task over a live server, and hand the server the last weights."""
    folder, settings = Path(out), json.loads(settings)
    task = load_task()
    lora = LoraConfig(r=8, lora_alpha=32, target_modules="all-linear") if settings.pop("uses_lora", False) else None
    trainer_class = Deaf if settings.pop("is_deaf", False) else BAPOTrainer
    model = settings.pop("model")
    reward = digits_reward if settings.pop("rewards_digits", False) else task.reward_func
    quantization = settings.pop("quantization", None)
    args = BAPOConfig(str(folder), **{**CPU, **OVER_SERVER, "vllm_server_host": "127.0.0.1", **LEARNS, **settings})
    trainer = trainer_class(
        model, reward, args, train_dataset=task.train_dataset, peft_config=lora,
        quantization_config=quantization and BitsAndBytesConfig(**quantization),
    )  # fmt: skip
    try:
        trainer.train()
    except RuntimeError as error:
        (folder / f"rank-{trainer.accelerator.process_index}.error").write_text(str(error))
        raise
    trainer.vllm_generation.sync_weights()
    trainer.save_model(str(folder / "final"))
    finish(trainer, folder)


class Server(NamedTuple):
    port: int
    trained: Path  # the warm-started model, which the server was started with
    untrained: Path  # of the same architecture
    num_processes: int  # of the trainers that learn


# The full cross of embeddings and processes would double the time and show nothing else.
@pytest.fixture(scope="module", params=[(False, 2), (True, 3)], ids=["untied-2", "tied-3"])
def server(request, tmp_path_factory):
    is_tied, num_processes = request.param
    folder = tmp_path_factory.mktemp("server")
    # vLLM's attention on CPUs needs heads of 32 or more
    with patch.dict(MODEL_SETTINGS, {"hidden_size": 128, "tie_word_embeddings": is_tied}):
        trained = warm_start_path()
        tokenizer = character_tokenizer()
        tiny_model(tokenizer, seed=1).save_pretrained(folder / "untrained")
        tokenizer.save_pretrained(folder / "untrained")
    with vllm_server(trained, folder / "server.log") as running:
        yield Server(running.port, trained, folder / "untrained", num_processes)


def settings_for(server, **settings) -> str:
    ports = {"vllm_server_port": server.port, "vllm_group_port": free_port()}
    return json.dumps({"model": str(server.trained), **ports, **settings})


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
        # Rare tokens have log-probabilities of -7 and below, of which float32 keeps 7 digits
        torch.testing.assert_close(torch.tensor(served), own, rtol=1e-5, atol=2e-5)


def assert_server_followed(logs: list[dict]) -> None:
    """After each transfer but the first, the server's log-probabilities moved with the trainer's."""
    _, *shares = [log.get("sampling/server_followed") for log in logs if "reward" in log]
    assert shares == pytest.approx([1] * len(shares), abs=0.02)


def run(tmp_path, server, num_processes, engine="cpu_zero3", start=fork, **settings) -> list[dict]:
    worker = calling(train_on_a_rank, tmp_path, settings_for(server, **settings))
    start(engine, worker, num_processes)
    logs = read_ranks(tmp_path, num_processes, **ENGINES[engine])[0]["logs"]
    assert len(logs) == settings["max_steps"]
    assert_server_followed(logs)
    assert max(log["ratio/max"] for log in logs) > 1.1  # off-policy: the weights changed
    return logs


def test_zero3_trainers_learn_over_the_server(tmp_path, server):
    logs = run(tmp_path, server, server.num_processes, start=launch, max_steps=30)
    generations = [log for log in logs if "reward" in log]
    for log in generations:
        # The warm-started model is sharp: in float32 its own rounding moves rare tokens by more than 1e-5.
        assert log["sampling/sampling_logp_difference/mean"] < 1e-6
        assert log["sampling/sampling_logp_difference/max"] < 2e-4
        assert log["sampling/raw_importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-6)
        assert log["sampling/masked_share"] == log["sampling/truncated_share"] == 0
    rewards = [log["reward"] for log in generations]
    assert statistics.mean(rewards[-2:]) > statistics.mean(rewards[:2]) + 0.03
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    tokenizer = AutoTokenizer.from_pretrained(server.trained)
    assert_server_has(server.port, model, tokenizer)
    with pytest.raises(AssertionError):  # and no longer those that it started with
        assert_server_has(server.port, AutoModelForCausalLM.from_pretrained(server.trained), tokenizer)


def test_zero3_trainers_learn_while_the_server_generates(tmp_path, server):
    """Each rollout batch but the first is sampled by the weights of the generation step before."""
    logs = run(tmp_path, server, server.num_processes, max_steps=30, overlap_generation=True)
    assert [log["staleness/max"] for log in logs[:12]] == [0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7]
    first, *later = [log for log in logs if "reward" in log]
    assert first["sampling/raw_importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-6)
    assert max(log["sampling/raw_importance_sampling_ratio/max"] for log in later) > 1.1
    assert {log["sampling/importance_sampling_ratio/mean"] for log in later} == {1}
    rewards = [first["reward"], *(log["reward"] for log in later)]
    assert statistics.mean(rewards[-2:]) > statistics.mean(rewards[:2]) + 0.03
    tokenizer = AutoTokenizer.from_pretrained(server.trained)
    assert_server_has(server.port, AutoModelForCausalLM.from_pretrained(tmp_path / "final"), tokenizer)


@pytest.mark.parametrize("engine", ENGINES)
def test_lora_adapters_reach_the_server_merged(tmp_path, server, engine):
    settings = {"max_steps": 8, "uses_lora": True, "learning_rate": 1e-3, "rewards_digits": True}
    logs = run(tmp_path, server, 2, engine, model=str(server.untrained), **settings)
    assert max(log["sampling/sampling_logp_difference/max"] for log in logs if "reward" in log) < 1e-5
    assert not (tmp_path / "final" / "model.safetensors").exists()
    base = AutoModelForCausalLM.from_pretrained(server.untrained)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "final").merge_and_unload()
    assert_server_has(server.port, model, AutoTokenizer.from_pretrained(server.trained))


def test_a_base_in_4_bits_and_its_adapter_reach_an_unquantized_server(tmp_path, server):
    quantization = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "float32"}
    settings = {"max_steps": 8, "uses_lora": True, "learning_rate": 1e-3, "rewards_digits": True}
    given = settings_for(server, model=str(server.untrained), quantization=quantization, **settings)
    succeeded(run_function(train_on_a_rank, tmp_path, given))
    logs = read_ranks(tmp_path, 1)[0]["logs"]
    assert max(log["sampling/sampling_logp_difference/mean"] for log in logs if "reward" in log) < 0.02
    base = AutoModelForCausalLM.from_pretrained(
        server.untrained, quantization_config=BitsAndBytesConfig(**quantization), dtype="float32"
    )
    model = peft.PeftModel.from_pretrained(base, tmp_path / "final").eval()
    prepare_quantized(model, is_sharded=False)
    assert_server_has(server.port, model, AutoTokenizer.from_pretrained(server.trained))


def test_a_server_with_other_weights_stops_the_training(tmp_path, server):
    settings = settings_for(server, max_steps=12, is_deaf=True, learning_rate=1e-2)
    result = run_function(train_on_a_rank, tmp_path, settings)
    assert result.returncode != 0
    assert "nats per token on average on the latest samples; `vllm_logp_tolerance` is 0.1" in result.stderr
    assert "server's weights are not the trainer's" in result.stderr


def test_the_method_trl_trains_over_a_server_on_a_cpu(tmp_path, server):
    """TRL's own client sends weights over NCCL only."""
    rows = [{"prompt": row["prompt"], "answer": row["answer"]} for row in load_task().train_dataset.select(range(32))]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {
        "method": "trl", "model_name_or_path": server.trained, "dataset_name": tmp_path / "data.jsonl",
        "reward_funcs": "bapo_trl.tasks.exact_match_reward", "use_vllm": True, "vllm_mode": "server",
        "vllm_server_port": server.port, "vllm_group_port": free_port(), "max_steps": 3, "max_completion_length": 4,
        "num_generations": 4, "per_device_train_batch_size": 8, "use_cpu": True, "gradient_accumulation_steps": 1,
        "bf16": False, "report_to": "none", "output_dir": tmp_path / "out", "learning_rate": 1e-3,
        "logging_steps": 1,
    }  # fmt: skip
    flags = [part for name, value in settings.items() for part in (f"--{name}", value)]
    succeeded(run_python(["-m", "bapo_trl", "train", *flags]))
    *logs, _ = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    assert len(logs) == 3
    assert max(log["sampling/sampling_logp_difference/max"] for log in logs) < 2e-4  # after two transfers


# 1e-6 is TRL's default. A transfer after each 4 updates: there are 3 after the first one.
@pytest.mark.parametrize("engine", ENGINES)
def test_all_ranks_stop_together_when_the_server_is_stale(tmp_path, server, engine):
    settings = settings_for(server, max_steps=13, is_deaf=True, learning_rate=1e-6)
    assert run_ranks(engine, calling(train_on_a_rank, tmp_path, settings), timeout_s=120).returncode != 0
    errors = [(tmp_path / f"rank-{rank}.error").read_text() for rank in range(2)]
    assert errors[0] == errors[1]
    assert errors[0].startswith("vLLM does not load the trainer's weights")


def check_trainer_of_trl(out: str, settings: str) -> None:
    """Train with TRL's trainer and `check_server_weights` over a live server, which may hear of no weights."""
    settings, task = json.loads(settings), load_task()
    is_deaf, model = settings.pop("is_deaf"), settings.pop("model")
    settings = {**CPU, **OVER_SERVER, **LEARNS, "vllm_server_host": "127.0.0.1", "beta": 0.0, **settings}
    with patch.object(vllm_generation, "VLLMClient", GlooClient):
        trainer = GRPOTrainer(model, task.reward_func, GRPOConfig(out, **settings), task.train_dataset)
    check_server_weights(trainer)
    if is_deaf:
        trainer.vllm_generation.vllm_client.update_named_params = lambda *args: None
    try:
        trainer.train()
    except StaleServerError as error:
        Path(out, "error").write_text(str(error))
    finish(trainer, out)


@pytest.mark.parametrize("is_deaf", [False, True], ids=["healthy", "stale"])
def test_trainers_of_trl_are_checked(tmp_path, server, is_deaf):
    more = {"max_steps": 6, "steps_per_generation": 1, "learning_rate": 1e-5, "is_deaf": is_deaf}
    given = settings_for(server, model=str(server.trained), **more)
    succeeded(run_function(check_trainer_of_trl, tmp_path, given))
    assert (tmp_path / "error").exists() == is_deaf
    if not is_deaf:
        assert_server_followed(read_ranks(tmp_path, 1)[0]["logs"])


@pytest.mark.parametrize("config", [None, {"backend": "nccl"}])
def test_a_server_that_cannot_send_over_gloo_is_rejected(config):
    class Client(GlooVLLMClient):
        def __init__(self):
            self.base_url = "http://127.0.0.1:1"

        def get_server_info(self):
            return {"weight_transfer_config": config}

    with pytest.raises(RuntimeError, match=r"127.0.0.1:1 transfers weights by (None|'nccl').*bapo-trl serve"):
        Client().init_communicator("cpu")
