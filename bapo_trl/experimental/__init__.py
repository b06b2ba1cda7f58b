"""Trainers based on TRL's experimental trainers. They may change with TRL, in any release of this package."""

import trl

from ..upstream.trl_compat import TESTED_VERSIONS


if trl.__version__.split(".")[:2] != TESTED_VERSIONS[-1].split(".")[:2]:
    raise ImportError(
        f"trl is {trl.__version__}, and its asynchronous trainer changes with each release. Install the version that "
        f'`AsyncBAPOTrainer` is tested with: pip install "trl~={TESTED_VERSIONS[-1]}".'
    )
from .async_bapo_config import AsyncBAPOConfig
from .async_bapo_trainer import AsyncBAPOTrainer


__all__ = ["AsyncBAPOConfig", "AsyncBAPOTrainer"]
