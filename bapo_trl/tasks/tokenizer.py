"""Tokenizer of the tiny models, with one token per character."""

from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer


PAD_TOKEN = "<pad>"  # noqa: S105
EOS_TOKEN = "<eos>"  # noqa: S105


def character_tokenizer(alphabet: str | None = None) -> PreTrainedTokenizerFast:
    """
    Create a tokenizer that maps each ASCII character to one token, and any other character to its UTF-8 bytes.

    The tokenizer has a padding and an end token but no start token, adds no special tokens to a text, and pads on the
    left, as generation needs. `alphabet` restricts it to distinct printable ASCII characters without the space; other
    characters are dropped. Without `alphabet`, it has all bytes, and 258 tokens.

    Example:

    ```python
    >>> tokenizer = character_tokenizer()
    >>> ids = tokenizer("37+58=")["input_ids"]
    >>> len(ids), tokenizer.decode(ids)
    (6, '37+58=')

    ```
    """
    characters = sorted(pre_tokenizers.ByteLevel.alphabet()) if alphabet is None else alphabet
    # Qwen2's own class: `AutoTokenizer` uses it for every folder with a Qwen2 model, whatever class was saved there,
    # and adds its own unknown token unless one is given.
    return Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate([PAD_TOKEN, EOS_TOKEN, *characters])},
        merges=[],
        unk_token=PAD_TOKEN,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
