"""The embedded tasks: small, verifiable, with the tiny models that start them, made locally from a seed."""

from .embedded import EmbeddedTask
from .evaluation import HeldOutAccuracy, held_out_accuracy
from .model import tiny_model
from .pupils import load_task
from .running_totals import final_answer_reward
from .sums import exact_match_reward
from .tokenizer import character_tokenizer
from .warm_start import warm_start_path


__all__ = [
    "EmbeddedTask",
    "HeldOutAccuracy",
    "character_tokenizer",
    "exact_match_reward",
    "final_answer_reward",
    "held_out_accuracy",
    "load_task",
    "tiny_model",
    "warm_start_path",
]
