"""Which groups of completions are tied: no reward in them differs from another, so that there is nothing to prefer.

TRL subtracts the mean of a group from its rewards. In float32 the mean of equal numbers is often another number, and
what is left looks like an advantage. Ties are therefore read off the rewards.
"""

import torch

from ..reward_sums import weighted_sums


def tied_rows(
    rewards_per_func: torch.Tensor, weights: torch.Tensor, num_generations: int, summed_first: bool = True
) -> torch.Tensor:
    """
    Tell the rows whose group is tied.

    A group is tied if its largest and its smallest reward, the weighted sum over the functions, differ by no more than
    1e-8 (what TRL's `frac_reward_zero_std` takes for 0) and the rounding of such a sum, 4 float32 epsilons for each
    addend after the first, relative to the sum of the addends' magnitudes. Rows without any reward do not count; a
    group with fewer than two others is tied.

    Args:
        rewards_per_func (`torch.Tensor`): Rewards by function, shape `(B, F)`, the groups one after the other. NaN
            where a function gave none.
        weights (`torch.Tensor`): Weights of the functions, shape `(F,)`.
        summed_first (`bool`): Whether rewards are compared after summing them. If not, each function's must be tied.

    Returns:
        Boolean, shape `(B,)`, the same for all rows of a group.

    Example:

    ```python
    >>> tied_rows(torch.tensor([[0.7], [0.7], [0.7], [0.8]]), torch.ones(1), num_generations=2).tolist()
    [True, True, False, False]

    ```
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
