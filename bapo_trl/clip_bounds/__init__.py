"""
BAPO's adaptive clipping: clip bounds for each optimizer update, chosen to reach a target positive contribution.

The subpackage works on tokens and does not depend on TRL, replay or partial rollouts. All its functions are pure; only
the controller keeps state.

References:
    BAPO: Stabilizing Off-Policy Reinforcement Learning for LLMs via Balanced Policy Optimization with Adaptive
    Clipping, https://huggingface.co/papers/2510.18927, Algorithm 1 and Eq. 8.
"""

from .curves import MEASURES, Contributions, contributions, size_contributions
from .grid import BOUND_PARTS, BoundGrid, sum_dtype
from .search import SCOPES, SEARCH_ORDERS, ClipBounds, search_bounds, share_under


__all__ = [
    "BOUND_PARTS",
    "MEASURES",
    "SCOPES",
    "SEARCH_ORDERS",
    "BoundGrid",
    "ClipBounds",
    "Contributions",
    "contributions",
    "search_bounds",
    "share_under",
    "size_contributions",
    "sum_dtype",
]
