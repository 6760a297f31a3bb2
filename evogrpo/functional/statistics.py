"""Counts, means and sample standard deviations by group; the deviation of equal values is exactly 0."""

from typing import NamedTuple

import torch
from torch import Tensor


class GroupStatistics(NamedTuple):
    """Statistics of the values of each group, all float64 `[k]` for k groups.

    Attributes:
        amount: Number of values that apply.
        mean: Their mean; exactly the common value if all are equal, 0 if none applies.
        square: Sum of squared distances from the mean; exactly 0 if all are equal.
    """

    amount: Tensor
    mean: Tensor
    square: Tensor

    @property
    def std(self) -> Tensor:
        """`[k]` sample standard deviation (n - 1), in the unit of the values; 0 where fewer than two apply."""
        return (self.square / (self.amount - 1).clamp(min=1)).sqrt()


def group_statistics(values: Tensor, applies: Tensor, groups: Tensor, count: int) -> GroupStatistics:
    """Compute the statistics of values by group.

    Equality is tested on a group's minimum and maximum: the mean of eight 0.1s can differ from 0.1 by rounding, and
    that difference divided by a small standard deviation would be noise.

    Args:
        values: Any shape; values that do not apply are not read.
        applies: True for values that count, same shape.
        groups: Group numbers from 0 to `count - 1`, same shape.
        count: Number of groups.

    Returns:
        Statistics of groups 0 to `count - 1`.
    """
    values, groups = values[applies].double(), groups[applies]
    zeros = torch.zeros(count, dtype=torch.float64, device=values.device)
    low = (zeros + torch.inf).scatter_reduce(0, groups, values, "amin")
    high = (zeros - torch.inf).scatter_reduce(0, groups, values, "amax")
    amount = zeros.index_add(0, groups, torch.ones_like(values))
    mean = zeros.index_add(0, groups, values) / amount.clamp(min=1)
    mean = torch.where(low == high, low, mean)
    return GroupStatistics(amount, mean, zeros.index_add(0, groups, (values - mean[groups]) ** 2))


def numbered(ids: Tensor) -> tuple[Tensor, int]:
    """Number ids consecutively from 0.

    Args:
        ids: Any shape, integers.

    Returns:
        The numbers, in the shape of `ids`, and the number of distinct ids.
    """
    different, numbers = torch.unique(ids, return_inverse=True)
    return numbers, len(different)


def numbered_groups(group_ids: Tensor) -> tuple[Tensor, int]:
    """Number groups consecutively from 0; refuse groups of one.

    Args:
        group_ids: `[n]` integers.

    Returns:
        `[n]` group numbers, and the number of groups.

    Raises:
        ValueError: If a group has fewer than 2 completions.
    """
    different, numbers, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    if len(different) and int(sizes.min()) < 2:
        raise ValueError(
            f"every group must hold at least 2 completions, got 1 in groups {different[sizes < 2].tolist()[:5]}: "
            "a lone completion has nothing to be compared with"
        )
    return numbers, len(different)
