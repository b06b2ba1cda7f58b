"""Which method to take, as the studies found (docs/stability.md)."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from .bapo_config import BAPOConfig


PAGE = "docs/stability.md"
ADVICE: Mapping[str, Any] = MappingProxyType({"loss_type": "vespo"})
"""Fields of `BAPOConfig` to set, on top of the defaults."""


def advice_line(args: BAPOConfig) -> str:
    """Return what the terminal says of the advice at the start of a run with these settings."""
    if all(getattr(args, name) == value for name, value in ADVICE.items()):
        return f"The loss is the one advised ({PAGE})."
    return f"Advice: {', '.join(f'{name} {value}' for name, value in ADVICE.items())} ({PAGE})."
