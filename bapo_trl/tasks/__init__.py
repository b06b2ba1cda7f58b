"""
Built-in tasks with verifiable answers: sums with a tiny model, and tasks for chat models (SmolLM2 comes from a Python
package). Problems are generated locally from a seed.
"""

from .gym import GYM_PREFIX, gym_reward, load_gym_task
from .smollm2 import SMOLLM2, smollm2_path
from .sums import (
    CHAT_SUMS,
    MadeTask,
    exact_match_reward,
    last_number_reward,
    load_chat_sums,
    load_task,
    sums_model_path,
)
from .tokenizer import character_tokenizer


__all__ = [
    "CHAT_SUMS",
    "GYM_PREFIX",
    "SMOLLM2",
    "MadeTask",
    "character_tokenizer",
    "exact_match_reward",
    "gym_reward",
    "last_number_reward",
    "load_chat_sums",
    "load_gym_task",
    "load_task",
    "smollm2_path",
    "sums_model_path",
]
