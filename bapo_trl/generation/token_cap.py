"""How many tokens TRL's backends decode in a call."""

from collections.abc import Iterator
from contextlib import contextmanager

from trl import GRPOTrainer


@contextmanager
def token_cap(trainer: GRPOTrainer, num_tokens: int) -> Iterator[None]:
    """Let the trainer's sampler decode at most `num_tokens` a call; afterwards, what it did before."""
    if trainer.use_vllm:
        vllm = trainer.vllm_generation
        before, vllm.max_completion_length = vllm.max_completion_length, num_tokens
        try:
            yield
        finally:
            vllm.max_completion_length = before
        return
    # transformers reads one, and TRL copies the other into the model's own generation config
    config, kwargs = trainer.generation_config, trainer.generation_kwargs
    both_before = config.max_new_tokens, kwargs["max_new_tokens"]
    config.max_new_tokens = kwargs["max_new_tokens"] = num_tokens
    try:
        yield
    finally:
        config.max_new_tokens, kwargs["max_new_tokens"] = both_before
