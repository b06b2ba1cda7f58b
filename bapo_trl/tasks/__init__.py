"""
Small verifiable tasks, made locally from a seed: the embedded one of the demo with the tiny model that starts it, and
tasks for chat models, one of which a package carries.
"""

from .embedded import EmbeddedTask, MadeTask, WarmStart
from .gym import GYM_PREFIX, gym_reward, load_gym_task
from .model import character_tokenizer, tiny_model
from .smollm2 import SMOLLM2, check_smollm2, has_smollm2, smollm2_path
from .sums import CHAT_SUMS, exact_match_reward, load_chat_sums, load_task
from .warm_start import save_warm_start_shape, warm_start_path


__all__ = [
    "CHAT_SUMS",
    "GYM_PREFIX",
    "SMOLLM2",
    "EmbeddedTask",
    "MadeTask",
    "WarmStart",
    "character_tokenizer",
    "check_smollm2",
    "exact_match_reward",
    "gym_reward",
    "has_smollm2",
    "load_chat_sums",
    "load_gym_task",
    "load_task",
    "save_warm_start_shape",
    "smollm2_path",
    "tiny_model",
    "warm_start_path",
]
