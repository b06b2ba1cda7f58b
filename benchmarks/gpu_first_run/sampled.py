"""Parts `colocate`, `learns`, `chat` and `qlora`: training over vLLM in colocate mode, or transformers' sampler."""

import importlib.util
import tempfile
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import yaml
from transformers import AutoTokenizer, BitsAndBytesConfig

from bapo_trl import BAPOTrainer
from bapo_trl.tasks import character_tokenizer, load_chat_sums
from benchmarks.common import ROOT
from benchmarks.gpu_first_run.shapes import lora, make_model
from benchmarks.gpu_first_run.trainers import Case, Progress, Setup, make_trainer, settings_for, sums_task
from benchmarks.tiny_model import MODEL_SETTINGS
from benchmarks.warm_start import warm_start_path


COLOCATE_UPDATES = 12
CHAT_SEEDS = (0, 1, 2)
OLDER_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
REPLAY = {"replay_capacity": 256, "replay_fraction": 0.5, "replay_max_staleness": 16}
PARTIAL = {"partial_rollout_oversampling": 1.5}
SCRIPT_ONLY = {"dataset_name", "model_name_or_path", "output_dir", "use_peft", "search_scope", "attn_implementation"}


def over_vllm(memory_share: float, max_tokens: int = 512) -> dict[str, Any]:
    """Return the settings of colocate mode. Samples are stale, so ratios are truncated and sequences are kept."""
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": memory_share,
        "vllm_max_model_length": max_tokens,
        "vllm_importance_sampling_mode": "token_truncate",
    }


def colocate(setup: Setup) -> dict[str, Case]:
    both = {**REPLAY, **PARTIAL, "partial_rollout_chunk_length": setup.sizes.sampled_tokens // 4}
    sleep = {"vllm_enable_sleep_mode": True}
    settings: dict[str, tuple[dict, bool]] = {
        "LoRA, replay, partial rollouts": (both, True),
        "all weights": ({}, False),
        "LoRA": ({}, True),
        "all weights, replay, partial rollouts, sleep mode": ({**both, **sleep}, False),
    }
    return {
        name: Case(partial(_colocate, setup, name, *given), stage=1, lacks=find_lack_of_vllm(setup))
        for name, given in settings.items()
    }


def find_lack_of_vllm(setup: Setup) -> str | None:
    is_installed = importlib.util.find_spec("vllm") is not None
    return setup.lacks_gpu or (None if is_installed else "vllm is not installed")


def _colocate(setup: Setup, name: str, settings: dict, uses_lora: bool) -> dict:
    tokens, tokenizer = setup.sizes.sampled_tokens, character_tokenizer()
    # The tokenizer's own vocabulary: vLLM turns each token into text
    shape = replace(setup.sizes.trained, vocabulary=len(tokenizer))
    given = settings_for(
        setup, 16, tokens, max_steps=COLOCATE_UPDATES, num_generations=8, **over_vllm(0.3), **settings
    )
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(shape, setup.device, torch.bfloat16 if setup.on_gpu else torch.float32, setup.seed)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        del model
        return train(setup, name, folder, given, uses_lora)


def learns(setup: Setup) -> dict[str, Case]:
    parts = {**PARTIAL, "partial_rollout_chunk_length": 2}
    vllm = over_vllm(0.15, MODEL_SETTINGS["max_position_embeddings"])
    settings = {
        "transformers": {},
        "vLLM": vllm,
        "transformers, partial rollouts": parts,
        "vLLM, partial rollouts": {**vllm, **parts},
    }
    return {
        name: Case(
            partial(_learn, setup, name, given), stage=1,
            lacks=find_lack_of_vllm(setup) if "use_vllm" in given else None,
        )
        for name, given in settings.items()
    }  # fmt: skip


def _learn(setup: Setup, name: str, settings: dict) -> dict:
    task = sums_task(setup)
    given = settings_for(
        setup, setup.sizes.learned_rows, task.max_new_tokens, gradient_accumulation_steps=2, steps_per_generation=8,
        num_iterations=1, num_generations=8, max_steps=setup.sizes.learned_updates, learning_rate=5e-4,
        gradient_checkpointing=False,
        **settings,
    )  # fmt: skip
    options = {"train_dataset": task.train_dataset, "reward_funcs": task.reward_func}
    return train(setup, name, str(warm_start_path(setup.seed, task)), given, uses_lora=False, **options)


def chat(setup: Setup) -> dict[str, Case]:
    parts = {**PARTIAL, "partial_rollout_chunk_length": 8}
    both = {**REPLAY, **parts}
    # Settings, rounding of the merged adapter, environment variables
    variants: dict[str, tuple[dict, str | None, dict]] = {
        "transformers": ({}, None, {}),
        "transformers, replay": (REPLAY, None, {}),
        "transformers, partial rollouts": (parts, None, {}),
        "transformers, replay, partial rollouts": (both, None, {}),
        "vLLM, merge nearest": ({}, "nearest", {}),
        "vLLM, merge stochastic": ({}, "stochastic", {}),
        "vLLM, merge stochastic, older runner": ({}, "stochastic", OLDER_RUNNER),
        "vLLM, merge nearest, replay, partial rollouts": (both, "nearest", {}),
        "vLLM, merge stochastic, replay, partial rollouts": (both, "stochastic", {}),
    }
    lacks_model = None if setup.chat_model else "needs a model: `--chat_model FOLDER`"
    return {
        f"{name}, seed {seed}": Case(
            partial(_chat, setup, f"{name}, seed {seed}", settings, merge, seed), 1 + seed, environment,
            lacks_model or (find_lack_of_vllm(setup) if merge else None),
        )
        for seed in CHAT_SEEDS
        for name, (settings, merge, environment) in variants.items()
    }  # fmt: skip


def qlora(setup: Setup) -> dict[str, Case]:
    lacks = None if importlib.util.find_spec("bitsandbytes") else "bitsandbytes is not installed"
    lacks = lacks if setup.chat_model else "needs a model: `--chat_model FOLDER`"
    # Rounding of the merged adapter, and whether the base is in 4 bits
    variants = {
        "bfloat16, vLLM": ("stochastic", False),
        "4 bits, vLLM": ("stochastic", True),
        "4 bits, transformers": (None, True),
    }
    return {
        name: Case(
            partial(_chat, setup, name, {}, merge, setup.seed, in_4_bits), stage=1,
            lacks=lacks or (find_lack_of_vllm(setup) if merge else None),
        )
        for name, (merge, in_4_bits) in variants.items()
    }  # fmt: skip


def _chat(setup: Setup, name: str, settings: dict, merge: str | None, seed: int, in_4_bits: bool = False) -> dict:
    recipe = yaml.safe_load((ROOT / "recipes" / "smollm2_sums.yaml").read_text())
    own = {
        key: value
        for key, value in recipe.items()
        if key not in SCRIPT_ONLY and not key.startswith(("lora_", "save_")) and "eval" not in key
    }
    here = {"use_cpu": not setup.on_gpu, "bf16": setup.on_gpu, "dataloader_pin_memory": setup.on_gpu, "seed": seed}
    here |= {"num_iterations": 1, "logging_steps": 1, "max_steps": setup.sizes.chat_updates}
    here |= settings if merge is None else {**settings, **over_vllm(0.15)}
    given = settings_for(setup, 32, 16, **{**own, **here})
    task = load_chat_sums(seed)
    options = {
        "train_dataset": task.train_dataset,
        "reward_funcs": task.reward_func,
        "processing_class": AutoTokenizer.from_pretrained(setup.chat_model),
    }
    if in_4_bits:
        compute = torch.bfloat16 if setup.on_gpu else torch.float32
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute
        )
    return train(setup, name, str(setup.chat_model), given, uses_lora=True, merge=merge, **options)


def choose_merge(trainer: BAPOTrainer, merge: str) -> None:
    """Merge the adapter as `BAPOTrainer` does, with stochastic rounding, or as TRL does, rounding to the nearest."""
    if merge == "nearest":
        del trainer.vllm_generation.sync_weights  # TRL's own method shows again


def train(
    setup: Setup, name: str, model: str, settings: dict, uses_lora: bool, merge: str | None = None, **options: Any
) -> dict:
    """Train the model in a folder, and return the curves and the generation speed."""
    dtype = "bfloat16" if uses_lora and setup.on_gpu else "float32"
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        trainer = make_trainer(
            "batch", model, folder, {**settings, "model_init_kwargs": {"dtype": dtype}},
            peft_config=lora() if uses_lora else None, callbacks=[Progress(name)], **options,
        )  # fmt: skip
        start_s = time.perf_counter() - began
        if merge is not None:
            choose_merge(trainer, merge)
        generated = GenerationClock(trainer)
        began = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - began
    logs = [log for log in trainer.state.log_history if "reward" in log]
    kept = ("reward", "completions/mean_length", "sampling/", "staleness/max", "replay/fraction")
    return {
        "updates": trainer.state.global_step,
        "start_s": start_s,
        "seconds": seconds,
        "generation_s": generated.seconds,
        "tokens": generated.tokens,
        "generations": [{key: value for key, value in log.items() if key.startswith(kept)} for log in logs],
    }


class GenerationClock:
    """Total seconds of a trainer's generations, including loading the weights, and generated tokens."""

    def __init__(self, trainer: BAPOTrainer):
        self.seconds, self.tokens = 0.0, 0
        self._trainer, self._generate = trainer, trainer._generate_single_turn
        trainer._generate_single_turn = self._timed  # ty: ignore

    def _timed(self, *args: Any, **kwargs: Any) -> Any:
        is_sampled = self._trainer._injected is None
        began = time.perf_counter()
        output = self._generate(*args, **kwargs)
        if is_sampled:
            self.seconds += time.perf_counter() - began
            self.tokens += sum(map(len, output[0]))
        return output
