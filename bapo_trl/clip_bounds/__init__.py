"""
The method: clip bounds chosen for each optimizer update such that positive-advantage tokens contribute a set share.

Knows tokens alone: nothing of TRL, of replay or of partial rollouts. All but its controller and the log of an update
is pure.

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
