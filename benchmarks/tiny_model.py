"""A causal language model small enough to train on a laptop."""

from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM


MODEL_SETTINGS: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}


def tiny_model(tokenizer: PreTrainedTokenizerBase, seed: int, **settings: int) -> Qwen2ForCausalLM:
    """
    Return a randomly initialised Qwen2 model for a tokenizer, in float32 on the CPU, in evaluation mode.

    `settings` override `MODEL_SETTINGS`. The global random state is not changed.
    """
    config = Qwen2Config(
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
        **{**MODEL_SETTINGS, "vocab_size": len(tokenizer), **settings},
    )
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        model = Qwen2ForCausalLM(config).float().eval()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model
