"""A causal language model small enough to train on a laptop, and its tokenizer with one token a character."""

from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import (
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)


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
PAD_TOKEN = "<pad>"  # noqa: S105
EOS_TOKEN = "<eos>"  # noqa: S105


def tiny_model(tokenizer: PreTrainedTokenizerBase, seed: int, **settings: int) -> Qwen2ForCausalLM:
    """
    Make a randomly initialised Qwen2 model for a tokenizer, in float32 on the CPU, in evaluation mode.

    `settings` come in place of those of `MODEL_SETTINGS`. The global random state is left as it was.
    """
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
        **{**MODEL_SETTINGS, **settings},
    )
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        model = Qwen2ForCausalLM(config).float().eval()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def character_tokenizer(alphabet: str | None = None) -> PreTrainedTokenizerFast:
    """
    Build a tokenizer that maps every ASCII character to one token (any other to its UTF-8 bytes).

    It has a padding and an end token and no start token, adds nothing to a text, and pads on the left, as generation
    needs. An `alphabet` is of printable ASCII characters other than the space, none of them twice; texts lose any
    other. Without one, it is all bytes, and the tokenizer has 258 tokens.

    Example:

    ```python
    >>> tokenizer = character_tokenizer()
    >>> ids = tokenizer("37+58=")["input_ids"]
    >>> len(ids), tokenizer.decode(ids)
    (6, '37+58=')

    ```
    """
    characters = sorted(pre_tokenizers.ByteLevel.alphabet()) if alphabet is None else alphabet
    # Qwen2's own class: `AutoTokenizer` takes it for every folder with a Qwen2 model, whatever class was saved there,
    # and adds its own unknown token unless that is named.
    return Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate([PAD_TOKEN, EOS_TOKEN, *characters])},
        merges=[],
        unk_token=PAD_TOKEN,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
