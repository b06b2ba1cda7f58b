"""Whether vLLM has the trainer's weights, as TRL's trainers note it: by the update after which they sent them."""

from typing import Any


def has_sent_weights(trainer: Any) -> bool:
    """Return whether the weights of the latest update were sent."""
    return trainer._last_loaded_step == trainer.state.global_step


def send_weights(trainer: Any) -> None:
    """Send the weights, as TRL does before a generation."""
    trainer.vllm_generation.sync_weights()
    trainer._last_loaded_step = trainer.state.global_step


def forget_sent_weights(trainer: Any) -> None:
    """Have TRL send the weights before the next generation."""
    trainer._last_loaded_step = -1
