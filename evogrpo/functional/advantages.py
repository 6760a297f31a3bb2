"""Group-relative advantages: how a completion's reward compares with the rest of its group."""

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, group_ids: Tensor, eps: float = 1e-4) -> Tensor:
    r"""Standardise each reward against its own group: (r - mean_g) / (std_g + eps).

    The standard deviation is the sample one (n - 1). A group whose rewards are all equal gets exactly 0, tested by
    comparing its extremes: a float32 mean of eight 0.1s misses 0.1, and the remainder divided by a small eps would
    teach noise.

    Args:
        rewards: `[n]` one scalar per completion; NaN marks "no reward applies" and is left out of the statistics.
        group_ids: `[n]` which group each completion belongs to; any order, any group sizes.
        eps: Added to the standard deviation, in reward units.

    Returns:
        `[n]` advantages in the dtype of `rewards`, dimensionless; 0 for NaN rewards and for groups in which fewer
        than two rewards apply.

    Raises:
        ValueError: If a group has fewer than 2 completions.

    Source: DeepSeekMath (arXiv:2402.03300), section 4.1.2.
    """
    if rewards.numel() == 0:
        return torch.zeros_like(rewards)
    groups, inverse, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    if int(sizes.min()) < 2:
        lonely = groups[sizes < 2].tolist()
        raise ValueError(
            f"every group must hold at least 2 completions, got 1 in groups {lonely[:5]}: "
            "a lone completion has nothing to be compared with"
        )
    applies = ~rewards.isnan()
    values = torch.where(applies, rewards, 0.0).double()

    def total(x: Tensor) -> Tensor:
        return torch.zeros(len(groups), dtype=torch.float64, device=x.device).index_add(0, inverse, x)

    count = total(applies.double())
    centred = torch.where(applies, values - (total(values) / count.clamp(min=1))[inverse], 0.0)
    std = (total(centred**2) / (count - 1).clamp(min=1)).sqrt()
    advantages = centred / (std[inverse] + eps)
    teaches = ~zero_variance_groups(rewards, inverse, len(groups))[inverse]
    return torch.where(applies & teaches, advantages, 0.0).to(rewards.dtype)


def zero_variance_groups(rewards: Tensor, groups: Tensor, count: int) -> Tensor:
    """Tell which groups teach nothing: all rewards that apply are equal, or fewer than two apply.

    Args:
        rewards: `[n]` one scalar per completion; NaN = does not apply.
        groups: `[n]` group numbers from 0 to `count - 1`.
        count: Number of groups.

    Returns:
        `[count]` booleans.
    """
    applies = ~rewards.isnan()
    low = torch.full((count,), torch.inf, dtype=rewards.dtype, device=rewards.device)
    high = -low
    low = low.scatter_reduce(0, groups, torch.where(applies, rewards, torch.inf), "amin")
    high = high.scatter_reduce(0, groups, torch.where(applies, rewards, -torch.inf), "amax")
    return low >= high
