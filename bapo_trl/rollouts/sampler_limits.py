"""How many tokens TRL's backends decode in a call, and how many they take in all."""

from collections.abc import Iterator
from contextlib import contextmanager

from accelerate.utils import broadcast_object_list
from trl import GRPOTrainer

from ..upstream.trl_compat import HAS_OPENAI_CLIENT


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


def sampler_window(trainer: GRPOTrainer) -> int | None:
    """
    Return the largest number of tokens of a prompt and its completion that vLLM takes, the same on all ranks.

    `None` for transformers, which sets no limit, and for the server of TRL up to 1.14, which does not tell it.
    """
    if not trainer.use_vllm:
        return None
    if trainer.vllm_mode == "colocate":
        return trainer.vllm_generation.llm.llm_engine.model_config.max_model_len
    if not HAS_OPENAI_CLIENT:
        return None
    window = None
    if trainer.accelerator.is_main_process:
        window = trainer.vllm_generation.vllm_client.get_server_info()["model_config"]["max_model_len"]
    return broadcast_object_list([window])[0]
