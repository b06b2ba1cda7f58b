"""Keep the pool of unfinished rollouts in a checkpoint folder: one file a rank, see `rank_files`."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..checkpoints.rank_files import SENSELESS, RankFiles
from ..errors import InputError
from .pool import Group, PartialCompletion, PoolCounts, PoolState


FILES = RankFiles(
    "rollout pool", "1", "start anew from the weights, with `model_name_or_path` set to the checkpoint's folder"
)


def save_pool(state: PoolState, folder: str | Path, rank: int, num_ranks: int) -> Path:
    """Write the pool of one rank into a checkpoint folder; return the file."""
    completions = [completion for group in state.groups for completion in group.completions]
    unknown = math.nan  # for a token whose log-probability the sampler did not report
    sampler_logps = [
        unknown if value is None else value for completion in completions for value in completion.sampler_logps
    ]
    tensors = {
        "prompt_ids": torch.tensor([token for group in state.groups for token in group.prompt_ids], dtype=torch.int32),
        "tokens": torch.tensor([token for each in completions for token in each.tokens], dtype=torch.int32),
        "logps": torch.tensor([value for each in completions for value in each.logps], dtype=torch.float32),
        "sampler_logps": torch.tensor(sampler_logps, dtype=torch.float32),
    }
    groups = [
        {
            "id": group.id,
            "inputs": group.inputs,
            "completed_as": group.completed_as,
            "prompt_length": len(group.prompt_ids),
            "completions": [
                {
                    "segments": completion.segments,
                    "lengths": [len(completion.tokens), len(completion.logps), len(completion.sampler_logps)],
                    "has_ended": completion.has_ended,
                }
                for completion in group.completions
            ],
        }
        for group in state.groups
    ]
    rest = {name: getattr(state, name) for name in ("next_id", "next_place")}
    return FILES.write(folder, rank, num_ranks, {**tensors, "groups": groups, "counts": asdict(state.counts), **rest})


def is_pool_file(name: str) -> bool:
    """Return whether a file of a checkpoint folder, by its name, is the pool of a rank."""
    return FILES.num_ranks_of(name) is not None


def load_pool(folder: str | Path, rank: int, num_ranks: int) -> PoolState | None:
    """
    Read what one rank takes over from a checkpoint folder.

    With another number of ranks than at saving, the groups of all ranks are dealt out again, in the order of their
    numbers: the i-th goes to rank i modulo the number of ranks. The counts of saved rank i go to the same. `None` if
    the folder holds no pool.
    """
    paths = FILES.find(folder)
    if not paths:
        return None
    if len(paths) == num_ranks:
        return _read(paths[rank])
    states = [_read(path) for path in paths]
    groups = sorted((group for state in states for group in state.groups), key=lambda group: group.id)
    counts = PoolCounts()
    for state in states[rank::num_ranks]:
        for name, value in asdict(state.counts).items():
            setattr(counts, name, getattr(counts, name) + value)
    return PoolState(
        groups[rank::num_ranks],
        counts,
        next_id=max(state.next_id for state in states),
        next_place=max(state.next_place for state in states),
    )


def check_no_pool(folder: str | Path) -> None:
    """Refuse to resume without partial rollouts from a checkpoint that holds unfinished ones."""
    num_ranks = len(FILES.find(folder))
    groups = sum(len(load_pool(folder, rank, num_ranks).groups) for rank in range(num_ranks))
    if groups:
        raise InputError(
            f"`partial_rollout_oversampling` is 1.0, but the checkpoint {folder} holds {groups} unfinished groups, "
            "which would be lost: set it to what it was."
        )


def _read(path: Path) -> PoolState:
    state = FILES.read(path)
    try:
        tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        values = {name: iter(tensor.tolist()) for name, tensor in tensors.items()}

        def take(name: str, count: int) -> list[Any]:
            return [next(values[name]) for _ in range(count)]

        groups = []
        for saved in state["groups"]:
            prompt_ids = take("prompt_ids", saved["prompt_length"])
            completions = []
            for each in saved["completions"]:
                num_tokens, num_logps, num_sampler_logps = each["lengths"]
                completions.append(
                    PartialCompletion(
                        tokens=take("tokens", num_tokens),
                        segments=each["segments"],
                        logps=take("logps", num_logps),
                        sampler_logps=[
                            None if math.isnan(value) else value for value in take("sampler_logps", num_sampler_logps)
                        ],
                        has_ended=each["has_ended"],
                    )
                )
            groups.append(Group(saved["id"], saved["inputs"], prompt_ids, completions, saved["completed_as"]))
        rest = {name: state[name] for name in ("next_id", "next_place")}
        return PoolState(groups, PoolCounts(**state["counts"]), **rest)
    except SENSELESS as error:
        raise FILES.damaged(path, error) from error
