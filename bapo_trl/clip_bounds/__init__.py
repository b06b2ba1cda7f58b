"""
The method: clip bounds chosen for each optimizer update such that positive-advantage tokens contribute a set share.

Pure but for [`~update_bounds.UpdateBounds`], which chooses the bounds of a run, and [`~update_log.UpdateLog`], which
collects what is logged of an update. Knows nothing of TRL, of replay or of partial rollouts.

References:
    BAPO: Stabilizing Off-Policy Reinforcement Learning for LLMs via Balanced Policy Optimization with Adaptive
    Clipping, https://huggingface.co/papers/2510.18927, Algorithm 1 and Eq. 8.
"""

from .curves import MEASURES, Contributions, contributions, size_contributions
from .grid import BoundGrid, sum_dtype
from .search import SEARCH_ORDERS, ClipBounds, search_bounds, share_under


__all__ = [
    "MEASURES",
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
