"""BAPO (Balanced Policy Optimization with Adaptive Clipping, arXiv 2510.18927) as a TRL trainer."""

from .bapo_config import BAPOConfig
from .bapo_trainer import BAPOTrainer


__all__ = ["BAPOConfig", "BAPOTrainer"]
__version__ = "0.1.0"
