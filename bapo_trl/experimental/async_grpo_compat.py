"""TRL's asynchronous trainer, of the tested minor version: it changes with each release."""

import trl

from ..upstream.trl_compat import TESTED_VERSIONS


if trl.__version__.split(".")[:2] != TESTED_VERSIONS[-1].split(".")[:2]:
    raise ImportError(
        f"trl is {trl.__version__}, and its asynchronous trainer changes with each release. Install the version that "
        f'`AsyncBAPOTrainer` is tested with: pip install "trl~={TESTED_VERSIONS[-1]}".'
    )
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer


__all__ = ["AsyncGRPOConfig", "AsyncGRPOTrainer"]
