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
class Sizes:
    """Sizes of a run: of its models, lengths and trainings."""

    trained: Shape
    layout_rows: int
    layout_tokens: int
    layout_rounds: int
    chat_updates: int
    warm_start: dict[str, int]
    sharded_flags: dict[str, Any]
    timed_start_steps: int
    timed_every: int
    timed_flags: dict[str, Any]


SIZES = {
    "full": Sizes(
        trained=QWEN_05B,
        layout_rows=8,
        layout_tokens=1024,
        layout_rounds=2,
        chat_updates=32,
        warm_start={},
        sharded_flags={},
        timed_start_steps=5,
        timed_every=16,
        timed_flags={
            "max_steps": 64, "per_device_train_batch_size": 16, "per_device_eval_batch_size": 256,
            "max_completion_length": 32, "max_eval_samples": 256,
        },
    ),
    "tiny": Sizes(
        trained=TINY,
        layout_rows=4,
        layout_tokens=24,
        layout_rounds=1,
        chat_updates=4,
        warm_start={"num_steps": 4},
        # After so short a warm start no sum is right: a reward of token ids, so that the weights move
        sharded_flags={"per_device_train_batch_size": 8, "reward_funcs": "benchmarks.gpu_first_run.trainers.reward"},
        timed_start_steps=1,
        timed_every=2,
        timed_flags={
            "max_steps": 4, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8,
            "max_completion_length": 8, "max_eval_samples": 8,
        },
    ),
}  # fmt: skip


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
