"""
Pure: what the rules of the chat study, written before its runs, say of them (`studies/chat_chain_sum.yaml`).

A task is the final accuracy of each arm by seed, at one number of updates a generation.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

from bapo_trl.compare.statistics import Mean, differences


Task = Mapping[str, Mapping[int, float]]
SEEDS, OTHERS, TASKS = 8, 6, 2
STUDIES = {"chat_chain_sum": "chain sums", "chat_leg_counting": "legs"}
AGAINST = "VESPO"
DELTA, CAP = "half the weight, delta", "half the weight, cap"
NOT_AT_4 = {CAP}  # from the third seed on: it is the run of `delta` there


def above(task: Task, arm: str, baseline: str, comparisons: int = 1) -> Mean | None:
    """
    Return how far an arm ends above another; `None` for an arm that a task was not run with.

    Raises:
        ValueError: If a seed of it is missing.
    """
    if arm not in task:
        return None
    (found,) = differences(task, [(arm, baseline)], comparisons)
    if found.mean.count != SEEDS:
        raise ValueError(f"{arm} has {found.mean.count} of {SEEDS} seeds.")
    return found.mean


def arms_to_judge(task: Task, updates: int) -> Task:
    """Return a task without the arms that the study was not to run on all seeds at so many updates a generation."""
    return {arm: seeds for arm, seeds in task.items() if updates != 4 or arm not in NOT_AT_4}


def is_whole(task: Task) -> bool:
    """Return whether each arm of a task, VESPO among them, has all its seeds: before, no page shows it."""
    return AGAINST in task and all(len(seeds) == SEEDS for seeds in task.values())


def best_arm(tasks: Sequence[Task]) -> str | None:
    """
    Return the arm that the advice names by rule 3: above VESPO on all tasks, the highest of several.

    Raises:
        ValueError: If a task or a seed is missing.
    """
    _check_count(tasks)
    means = {}
    for arm in sorted({arm for task in tasks for arm in task} - {AGAINST}):
        found = [above(task, arm, AGAINST, OTHERS) for task in tasks]
        if all(mean is not None and mean.excludes_zero and mean.value > 0 for mean in found):
            means[arm] = fmean(mean.value for mean in found if mean)
    return max(means, key=means.__getitem__, default=None)


def cap_stays(tasks: Sequence[Task]) -> bool:
    """
    Return whether `negative_ratio_cap` stays by rule 4: above `delta` on one task, below on none.

    Raises:
        ValueError: If a task, an arm or a seed is missing.
    """
    _check_count(tasks)
    found = [above(task, CAP, DELTA) for task in tasks]
    if None in found:
        raise ValueError(f"{CAP} was not run on all tasks.")
    signs = [mean.value > 0 for mean in found if mean and mean.excludes_zero]
    return bool(signs) and all(signs)


def differing(task: Task) -> list[str]:
    """Return the arms whose interval against VESPO excludes 0, for rule 5."""
    found = {arm: above(task, arm, AGAINST, OTHERS) for arm in task if arm != AGAINST}
    return [arm for arm, mean in found.items() if mean and mean.excludes_zero]


def _check_count(tasks: Sequence[Task]) -> None:
    if len(tasks) != TASKS:
        raise ValueError(f"{len(tasks)} of {TASKS} tasks have runs.")
