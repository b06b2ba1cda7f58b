"""The embedded task of the demo: small, verifiable, with the tiny model that starts it, made locally from a seed."""

from .embedded import EmbeddedTask, WarmStart
from .evaluation import HeldOutAccuracy, held_out_accuracy
from .model import tiny_model
from .sums import exact_match_reward, load_task
from .tokenizer import character_tokenizer
from .warm_start import warm_start_path


__all__ = [
    "EmbeddedTask",
    "HeldOutAccuracy",
    "WarmStart",
    "character_tokenizer",
    "exact_match_reward",
    "held_out_accuracy",
    "load_task",
    "tiny_model",
    "warm_start_path",
]
