"""Sum rewards over the reward functions, and find zero-advantage groups. NaN is a reward that a function did not give.

Legend: `B` samples, `F` functions.
"""

import torch


def weighted_sums(rewards_per_func: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum the rewards `(B, F)` of each sample over the functions, with weights `(F,)`; NaN without any reward."""
    is_scored = ~rewards_per_func.isnan().all(dim=1)
    return (rewards_per_func * weights).nansum(dim=1).where(is_scored, torch.nan)


def zero_advantage_rows(
    rewards_per_func: torch.Tensor, weights: torch.Tensor, num_generations: int, summed_first: bool = True
) -> torch.Tensor:
    """
    Find the samples of zero-advantage groups, in which all completions have the same reward; boolean, `(B,)`.

    `rewards_per_func` is `(B, F)`, sorted by group, `weights` `(F,)`. Rewards are the same if the largest and smallest
    weighted sum (without `summed_first`, the rewards of each function) differ by at most 1e-8, as in TRL's
    `frac_reward_zero_std`, plus the rounding error of a sum: 4 float32 epsilons for each addend after the first,
    relative to their magnitudes. TRL's difference from the mean is not enough: in float32, the mean of equal numbers
    is often another one. Samples without any reward are ignored.
    """
    parts = rewards_per_func * weights
    if summed_first:
        rewards = weighted_sums(rewards_per_func, weights).unsqueeze(1)
        rounding = 4 * (parts.shape[1] - 1) * torch.finfo(parts.dtype).eps
        magnitudes = parts.abs().nansum(dim=1, keepdim=True)
    else:
        rewards, rounding, magnitudes = parts, 0.0, torch.zeros_like(parts)
    groups = rewards.view(-1, num_generations, rewards.shape[1])  # (groups, G, 1 or F)
    highest = groups.nan_to_num(nan=-torch.inf).amax(dim=1)
    lowest = groups.nan_to_num(nan=torch.inf).amin(dim=1)
    tolerance = 1e-8 + rounding * magnitudes.view_as(groups).amax(dim=1)
    return (highest - lowest <= tolerance).all(dim=1).repeat_interleave(num_generations)


def best_of_k(rewards_per_func: torch.Tensor, weights: torch.Tensor, num_generations: int) -> torch.Tensor:
    """
    Return the best reward among the completions of each prompt, `(P,)`.

    The rewards are `(B, F)`, sorted by group. Completions and prompts without any reward are ignored.
    """
    rewards = weighted_sums(rewards_per_func, weights.to(rewards_per_func.device))
    best = rewards.masked_fill(rewards.isnan(), -torch.inf).view(-1, num_generations).amax(dim=1)
    return best[best.isfinite()]
