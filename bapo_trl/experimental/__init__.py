"""Trainers based on TRL's experimental trainers. They may change with TRL, in any release of this package."""

from .async_bapo_config import AsyncBAPOConfig
from .async_bapo_trainer import AsyncBAPOTrainer


__all__ = ["AsyncBAPOConfig", "AsyncBAPOTrainer"]
