"""Part `qlora`: a chat model with its base in 4 bits and in bfloat16, sampled by vLLM in colocate mode or not."""

import importlib.util
import tempfile
import time
from functools import partial
from typing import Any

import torch
import yaml
from transformers import AutoTokenizer, BitsAndBytesConfig

from bapo_trl import BAPOTrainer
from bapo_trl.tasks import load_chat_sums
from benchmarks.common import ROOT
from benchmarks.gpu_first_run.shapes import lora
from benchmarks.gpu_first_run.trainers import Case, Progress, Setup, make_trainer, settings_for


SCRIPT_ONLY = {"dataset_name", "model_name_or_path", "output_dir", "use_peft", "search_scope", "attn_implementation"}


def over_vllm(memory_share: float) -> dict[str, Any]:
    """Return the settings of colocate mode. Samples are stale, so ratios are truncated and sequences are kept."""
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": memory_share,
        "vllm_max_model_length": 512,
        "vllm_importance_sampling_mode": "token_truncate",
    }


def qlora(setup: Setup) -> dict[str, Case]:
    lacks = None if importlib.util.find_spec("bitsandbytes") else "bitsandbytes is not installed"
    lacks = lacks if setup.chat_model else "needs a model: `--chat_model FOLDER`"
    lacks_vllm = setup.lacks_gpu or (None if importlib.util.find_spec("vllm") else "vllm is not installed")
    # Whether vLLM samples, and whether the base is in 4 bits
    variants = {"bfloat16, vLLM": (True, False), "4 bits, vLLM": (True, True), "4 bits, transformers": (False, True)}
    return {
        name: Case(partial(_train, setup, name, uses_vllm, in_4_bits), lacks or (lacks_vllm if uses_vllm else None))
        for name, (uses_vllm, in_4_bits) in variants.items()
    }


def _train(setup: Setup, name: str, uses_vllm: bool, in_4_bits: bool) -> dict:
    """Train by the recipe `smollm2_sums`, 4 updates per generation; return the rewards and the generation speed."""
    recipe = yaml.safe_load((ROOT / "recipes" / "smollm2_sums.yaml").read_text())
    own = {
        key: value
        for key, value in recipe.items()
        if key not in SCRIPT_ONLY and not key.startswith(("lora_", "save_")) and "eval" not in key
    }
    here = {"use_cpu": not setup.on_gpu, "bf16": setup.on_gpu, "dataloader_pin_memory": setup.on_gpu}
    here |= {"steps_per_generation": 4, "num_iterations": 1, "logging_steps": 1, "max_steps": setup.sizes.chat_updates}
    here |= {"model_init_kwargs": {"dtype": "bfloat16" if setup.on_gpu else "float32"}}
    settings = settings_for(setup, 32, 16, **{**own, **here, **(over_vllm(0.15) if uses_vllm else {})})
    task, compute = load_chat_sums(setup.seed), torch.bfloat16 if setup.on_gpu else torch.float32
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        trainer = make_trainer(
            "batch", str(setup.chat_model), folder, settings, peft_config=lora(), callbacks=[Progress(name)],
            train_dataset=task.train_dataset, reward_funcs=task.reward_func,
            processing_class=AutoTokenizer.from_pretrained(setup.chat_model),
            **({"quantization_config": nf4} if in_4_bits else {}),
        )  # fmt: skip
        generated, started = GenerationClock(trainer), time.perf_counter()
        trainer.train()
        ended = time.perf_counter()
    logs = [log for log in trainer.state.log_history if "reward" in log]
    kept = ("reward", "completions/mean_length", "sampling/")
    return {
        "updates": trainer.state.global_step,
        "start_s": started - began,
        "seconds": ended - started,
        "generation_s": generated.seconds,
        "tokens": generated.tokens,
        "generations": [{key: value for key, value in log.items() if key.startswith(kept)} for log in logs],
    }


class GenerationClock:
    """Total seconds of a trainer's generations, including loading the weights, and generated tokens."""

    def __init__(self, trainer: BAPOTrainer):
        self.seconds, self.tokens = 0.0, 0
        self._generate = trainer._generate_single_turn
        trainer._generate_single_turn = self._timed  # ty: ignore

    def _timed(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        output = self._generate(*args, **kwargs)
        self.seconds += time.perf_counter() - began
        self.tokens += sum(map(len, output[0]))
        return output
