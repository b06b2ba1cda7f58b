"""Language model whose completions have lognormal lengths, for timing generation."""

import itertools
import math
from statistics import NormalDist

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerBase

from bapo_trl.tasks import character_tokenizer


ALPHABET = "0123456789+-=abcdefghijklmnopqrstuvwxyz"
CONSTANT = 100.0  # the size of a hidden state, which the last layer norm divides by


def lognormal_tokenizer() -> PreTrainedTokenizerBase:
    """Return the tokenizer of the model."""
    return character_tokenizer(ALPHABET)


def lognormal_hazards(median: float, tail: float, num_tokens: int) -> torch.Tensor:
    """
    Return the probability that a completion ends with its n-th token, given that it has not ended before.

    `tail` is the 95th percentile of the lengths over their median. Of shape `(num_tokens,)`, in float64.

    ```python
    >>> alive = (1 - lognormal_hazards(median=20, tail=5, num_tokens=200)).cumprod(0)
    >>> [round(alive[n - 1].item(), 2) for n in (20, 100)]
    [0.49, 0.05]

    ```
    """
    normal = NormalDist()
    sigma = math.log(tail) / normal.inv_cdf(0.95)
    longer = [1.0] + [1 - normal.cdf(math.log((length + 0.5) / median) / sigma) for length in range(1, num_tokens + 1)]
    return torch.tensor([1 - after / before for before, after in itertools.pairwise(longer)], dtype=torch.float64)


def lognormal_model(
    median: float, tail: float, prompt_tokens: int, max_completion_length: int, hidden: int = 64, layers: int = 2
) -> GPT2LMHeadModel:
    """
    Return a GPT-2 that ends completions with the hazard of each position, and otherwise samples characters uniformly.

    Its layers do their full computation but contribute nothing. So the hidden state at a position comes from the
    position embedding alone: the log-odds of ending, and a constant for the scale of the last layer norm.

    Args:
        median (`float`): Median length of the completions in tokens, the end token included.
        tail (`float`): 95th percentile of the lengths over their median.
        prompt_tokens (`int`): Length of all prompts.
        max_completion_length (`int`): Number of places that the model has for a completion.
        hidden (`int`, *optional*, defaults to `64`): Width. Heads are 32 wide, the least that vLLM's attention on CPUs
            supports.
        layers (`int`, *optional*, defaults to `2`): Number of layers.
    """
    tokenizer = lognormal_tokenizer()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=prompt_tokens + max_completion_length,
        n_embd=hidden,
        n_layer=layers,
        n_head=hidden // 32,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = GPT2LMHeadModel(config)
    hazards = lognormal_hazards(median, tail, max_completion_length)
    log_odds = (hazards / (1 - hazards)).log() + math.log(len(tokenizer) - 2)  # against the characters
    largest = 2 * log_odds.abs().max()
    share = log_odds / largest  # of the hidden state's size, at most a half
    with torch.no_grad():
        for block in model.transformer.h:
            for projection in (block.attn.c_proj, block.mlp.c_proj):
                projection.weight.zero_()
                projection.bias.zero_()
        places, head = model.transformer.wpe.weight, model.lm_head.weight
        model.transformer.wte.weight.zero_()
        places.zero_()
        # The layer norm turns (x, -x, c, -c, 0, ...) into sqrt(hidden / 2) x / sqrt(x^2 + c^2), and so on
        signal = (CONSTANT * share / (1 - share**2).sqrt()).float()
        places[prompt_tokens - 1 : -1, 0], places[prompt_tokens - 1 : -1, 1] = signal, -signal
        places[:, 2], places[:, 3] = CONSTANT, -CONSTANT
        head.zero_()
        head[tokenizer.eos_token_id, 0] = largest / math.sqrt(hidden / 2)
        head[tokenizer.pad_token_id, 2] = -100.0  # never sampled
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model.eval()
