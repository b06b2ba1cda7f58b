"""Pure: sums of rewards over the reward functions, in which NaN stands for a reward that a function did not give.

Legend: `B` rows, `F` functions.
"""

import torch


def weighted_sums(rewards_per_func: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """
    Sum each row's rewards over the functions.

    Args:
        rewards_per_func (`torch.Tensor`): Rewards by function, shape `(B, F)`. NaN where a function gave none; these
            do not count.
        weights (`torch.Tensor`): Weights of the functions, shape `(F,)`, on the same device.

    Returns:
        `torch.Tensor`: Shape `(B,)`, NaN for rows that no function scored.

    Example:

    ```python
    >>> rewards = torch.tensor([[1.0, 2.0], [1.0, torch.nan], [torch.nan, torch.nan]])
    >>> weighted_sums(rewards, torch.tensor([1.0, 0.5]))
    tensor([2., 1., nan])

    ```
    """
    is_scored = ~rewards_per_func.isnan().all(dim=1)
    return (rewards_per_func * weights).nansum(dim=1).where(is_scored, torch.nan)


def best_of_k(rewards_per_func: torch.Tensor, weights: torch.Tensor, num_generations: int) -> float:
    """
    Return the mean over prompts of the best reward among the completions of each.

    Args:
        rewards_per_func (`torch.Tensor`): Rewards by function, shape `(B, F)`, the groups one after the other. NaN
            where a function gave none.
        weights (`torch.Tensor`): Weights of the functions, shape `(F,)`.
        num_generations (`int`): Completions of a prompt.

    Returns:
        `float`: NaN if no completion has a reward. Completions and prompts without any do not count.
    """
    rewards = weighted_sums(rewards_per_func, weights.to(rewards_per_func.device))
    best = rewards.masked_fill(rewards.isnan(), -torch.inf).view(-1, num_generations).amax(dim=1)
    return best[best.isfinite()].mean().item()
