"""The pool of unfinished rollouts of each rank in a checkpoint folder: one file a rank, see `rank_files`."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..checkpoints.rank_files import RankFiles
from ..errors import InputError
from .pool import PoolCounts, RolloutPool, pack, unpack_groups


FILES = RankFiles(
    "rollout pool", "2", "restart from the weights, with `model_name_or_path` set to the checkpoint's folder"
)


def save_pool(pool: RolloutPool, folder: str | Path, state: dict[str, Any] | None = None) -> Path:
    """Write the pool of one rank, or a state that it had, into a checkpoint folder; return the file."""
    return FILES.write(folder, pool.rank, pool.num_ranks, pool.state_dict() if state is None else state)


def load_pool(pool: RolloutPool, folder: str | Path, check: Callable[[dict[str, Any]], None] | None = None) -> bool:
    """
    Restore the pool of one rank from a checkpoint folder; return whether the folder holds any.

    With another number of ranks than at saving, the groups are dealt out again, see [`deal_out`]. `check` may raise an
    error for a state before the pool takes it over.
    """

    def load(state: dict[str, Any]) -> None:
        if check is not None:
            check(state)
        pool.load_state_dict(state)

    return FILES.load(folder, pool.rank, pool.num_ranks, load, deal_out)


def deal_out(states: Iterable[dict[str, Any]], rank: int, num_ranks: int) -> dict[str, Any]:
    """
    Return what one rank takes over from the pools of another number of ranks.

    In the order of their numbers, the i-th group goes to rank i modulo the number of ranks. The counts of saved rank i
    go to the same.
    """
    states = list(states)
    groups = sorted((group for state in states for group in unpack_groups(state)), key=lambda group: group.id)
    counts = PoolCounts()
    for state in states[rank::num_ranks]:
        for name, value in state["counts"].items():
            setattr(counts, name, getattr(counts, name) + value)
    next_id, next_place = (max(state[name] for state in states) for name in ("next_id", "next_place"))
    return pack(groups[rank::num_ranks], counts, next_id, next_place)


def check_no_pool(folder: str | Path) -> None:
    """Raise an error where a run without partial rollouts resumes from a checkpoint that holds unfinished ones."""
    groups = sum(len(FILES.read(path)["groups"]) for path in FILES.find(folder))
    if groups:
        raise InputError(
            f"`partial_rollout_oversampling` is 1.0, but the checkpoint {folder} holds {groups} unfinished groups, "
            "which would be lost: set it to what it was."
        )
