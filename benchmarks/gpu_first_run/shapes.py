"""Models with random weights in the shapes of Qwen2.5, created on the device, with their tokenizer and sizes."""

from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig
from transformers import Qwen2Config, Qwen2ForCausalLM

from bapo_trl.tasks import character_tokenizer


@dataclass(frozen=True)
class Shape:
    """Shape of a model; for Qwen2.5 as in its `config.json`."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    vocabulary: int
    ties_embeddings: bool

    def config(self, **tokens: int | None) -> Qwen2Config:
        return Qwen2Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads,
            tie_word_embeddings=self.ties_embeddings,
            max_position_embeddings=32768,
            architectures=["Qwen2ForCausalLM"],
            **tokens,
        )


QWEN_05B = Shape(896, 4864, 24, 14, 2, 151936, True)
QWEN_15B = Shape(1536, 8960, 28, 12, 2, 151936, True)
QWEN_3B = Shape(2048, 11008, 36, 16, 2, 151936, True)
QWEN_7B = Shape(3584, 18944, 28, 28, 4, 152064, False)
TINY = Shape(64, 128, 1, 2, 1, 320, True)


@dataclass(frozen=True)
class Load:
    """Size of a timed update: 4 micro-batches of `rows` samples, each with `completion_tokens`."""

    name: str
    shape: Shape
    uses_lora: bool
    rows: int
    completion_tokens: int
    rounds: int
    stage: int = 0  # when it comes: the small ones of all parts first


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run: the model to train, the timed updates, and the generated lengths."""

    trained: Shape
    completion_tokens: int
    loads: tuple[Load, ...]
    search_rows: int
    median_tokens: int
    groups: int
    generations: int
    rounds: int
    layout_rows: int
    layout_tokens: int
    layout_rounds: int
    sampled_tokens: int
    learned_updates: int
    learned_rows: int
    chat_updates: int
    warm_start: dict[str, int]
    sharded_flags: dict[str, Any]
    timed_start_steps: int
    timed_every: int
    timed_flags: dict[str, Any]


SIZES = {
    "full": Sizes(
        trained=QWEN_05B,
        completion_tokens=32,
        loads=(
            Load("0.5B, all weights, 2k", QWEN_05B, False, 4, 2048, 5),
            Load("7B, LoRA, 2k, one row", QWEN_7B, True, 1, 2048, 3, stage=1),
            Load("0.5B, all weights, 8k", QWEN_05B, False, 1, 8192, 5, stage=2),
            Load("7B, LoRA, 8k", QWEN_7B, True, 1, 8192, 3, stage=2),
        ),
        search_rows=512,
        median_tokens=32,
        groups=8,
        generations=3,
        rounds=2,
        layout_rows=8,
        layout_tokens=1024,
        layout_rounds=2,
        sampled_tokens=128,
        learned_updates=64,
        learned_rows=64,
        chat_updates=32,
        warm_start={},
        sharded_flags={},
        timed_start_steps=5,
        timed_every=5,
        timed_flags={
            "max_steps": 20,
            "per_device_train_batch_size": 64,
            "per_device_eval_batch_size": 256,
            "max_completion_length": 32,
            "max_eval_samples": 256,
        },
    ),
    "tiny": Sizes(
        trained=TINY,
        completion_tokens=6,
        loads=(Load("tiny, LoRA", TINY, True, 2, 16, 2),),
        search_rows=8,
        median_tokens=4,
        groups=2,
        generations=1,
        rounds=1,
        layout_rows=4,
        layout_tokens=24,
        layout_rounds=1,
        sampled_tokens=8,
        learned_updates=8,
        learned_rows=8,
        chat_updates=4,
        warm_start={"num_steps": 4},
        # After so short a warm start no sum is right: a reward of token ids, so that the weights move
        sharded_flags={
            "per_device_train_batch_size": 8,
            "reward_funcs": "benchmarks.gpu_first_run.trainers.reward",
        },
        timed_start_steps=1,
        timed_every=2,
        timed_flags={
            "max_steps": 4,
            "per_device_train_batch_size": 8,
            "per_device_eval_batch_size": 8,
            "max_completion_length": 8,
            "max_eval_samples": 8,
        },
    ),
}


def make_model(shape: Shape, device: str, dtype: torch.dtype, seed: int) -> Qwen2ForCausalLM:
    """Return a model with random weights, created on the device."""
    tokenizer = character_tokenizer()
    config = shape.config(pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def lora() -> LoraConfig:
    """Return the settings of an adapter on all linear layers, without dropout."""
    return LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
