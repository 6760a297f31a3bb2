"""Statistics of rewards by group, and transformations of rewards before the advantage."""

from typing import NamedTuple

import torch
from torch import Tensor

PENALTY = "overlong_penalty"
"""Name of the penalty on long completions among the components of a reward."""


class GroupStatistics(NamedTuple):
    """Statistics of the values of each group, all float64 `[k]` for k groups.

    Attributes:
        amount: Number of values that apply.
        mean: Mean of these values; exactly the common value if all are equal, 0 if none applies.
        square: Sum of squared distances from the mean; exactly 0 if all are equal.
    """

    amount: Tensor
    mean: Tensor
    square: Tensor

    @property
    def std(self) -> Tensor:
        """`[k]` sample standard deviation (n - 1), in the unit of the values.

        0 where fewer than two apply.
        """
        return (self.square / (self.amount - 1).clamp(min=1)).sqrt()


def group_statistics(
    values: Tensor, applies: Tensor, groups: Tensor, count: int
) -> GroupStatistics:
    """Compute the statistics of values by group.

    Args:
        values: Any shape; values that do not apply are not read.
        applies: True for values that count, same shape.
        groups: Group numbers from 0 to `count - 1`, same shape.
        count: Number of groups.

    Returns:
        Statistics of groups 0 to `count - 1`.
    """
    # In float64, so that rounding stays far below differences of rewards.
    values = values[applies].double()
    groups = groups[applies]
    zeros = torch.zeros(count, dtype=torch.float64, device=values.device)
    low = (zeros + torch.inf).scatter_reduce(0, groups, values, "amin")
    high = (zeros - torch.inf).scatter_reduce(0, groups, values, "amax")
    amount = zeros.index_add(0, groups, torch.ones_like(values))
    mean = zeros.index_add(0, groups, values) / amount.clamp(min=1)
    # The mean of eight 0.1s can differ from 0.1 by rounding. Divided by a small deviation, that
    # would be noise.
    mean = torch.where(low == high, low, mean)
    deviations = values - mean[groups]
    square = zeros.index_add(0, groups, deviations**2)
    return GroupStatistics(amount, mean, square)


def consecutive_ids(ids: Tensor) -> tuple[Tensor, int]:
    """Number ids consecutively from 0.

    Args:
        ids: Any shape, integers.

    Returns:
        The numbers, in the shape of `ids`, and the number of distinct ids.
    """
    distinct, numbers = torch.unique(ids, return_inverse=True)
    return numbers, len(distinct)


def comparable_groups(group_ids: Tensor) -> tuple[Tensor, int]:
    """Number groups consecutively from 0, and require at least two completions in each.

    Args:
        group_ids: `[n]` integers.

    Returns:
        `[n]` group numbers, and the number of groups.

    Raises:
        ValueError: If a group has fewer than 2 completions.
    """
    distinct, numbers, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    if len(distinct) and int(sizes.min()) < 2:
        raise ValueError(
            "Each group must have at least 2 completions, got 1 in groups"
            f" {distinct[sizes < 2].tolist()[:5]}."
        )
    return numbers, len(distinct)


def normalise_rewards(
    rewards: Tensor,
    norm: str,
    *,
    group_ids: Tensor,
    member_ids: Tensor,
    running: Tensor | None = None,
    shift: bool = False,
    scale: bool = False,
    eps: float = 1e-4,
) -> Tensor:
    r"""Standardise rewards: (r - mean) / (std + eps), or only one of the two steps.

    Args:
        rewards: `[n]`; NaN = does not apply and stays NaN.
        norm: Source of mean and sample standard deviation: "group" (the completion's group),
            "batch" (all rewards of its member) or "running" (the member's running statistics; see
            `update_running_statistics`).
        group_ids: `[n]` group of each completion.
        member_ids: `[n]` member of each completion; with "running", its row in `running`.
        running: `[p, 3]` float64, as returned by `update_running_statistics`; needed by "running"
            only.
        shift: Subtract the mean only.
        scale: Divide by the standard deviation only; rewards that are all equal stay as they are.
        eps: Added to the standard deviation, in reward units.

    Returns:
        `[n]` in the dtype of `rewards`.

    Source: ROLL, `reward_norm`, `reward_shift` and `reward_scale`.
    """
    # 1. Find the statistics of each reward.
    if norm == "running":
        assert running is not None
        group = member_ids
        statistics = GroupStatistics(*running.unbind(1))
    else:
        compared = group_ids if norm == "group" else member_ids
        group, groups = consecutive_ids(compared)
        statistics = group_statistics(rewards, ~rewards.isnan(), group, groups)
    # 2. Subtract the mean and divide by the deviation, unless only one of the two is asked for.
    values = rewards.double()
    if not scale:
        values = values - statistics.mean[group]
    if not shift:
        std = statistics.std[group]
        # Where all values are equal, dividing by eps alone would multiply them by thousands.
        values = torch.where(std > 0, values / (std + eps), values)
    return values.to(rewards.dtype)


def difficulty_mask(
    rewards: Tensor, group_ids: Tensor, low: float | None, high: float | None
) -> Tensor:
    """Return a mask of completions in groups of medium difficulty: low < mean reward < high.

    Args:
        rewards: `[n]`; NaN = does not apply, and is left out of the mean.
        group_ids: `[n]` group of each completion.
        low: Lower bound, in reward units; None = no bound.
        high: Upper bound, in reward units; None = no bound.

    Returns:
        `[n]` booleans; True where no reward of a group applies.

    Source: ROLL, `difficulty_mask`.
    """
    group, groups = consecutive_ids(group_ids)
    statistics = group_statistics(rewards, ~rewards.isnan(), group, groups)
    inside = torch.ones(groups, dtype=torch.bool, device=rewards.device)
    if low is not None:
        inside &= statistics.mean > low
    if high is not None:
        inside &= statistics.mean < high
    # Groups without a reward have no difficulty.
    unknown = statistics.amount == 0
    return (inside | unknown)[group]


def zero_variance_groups(rewards: Tensor, groups: Tensor, count: int) -> Tensor:
    """Return a mask of groups without learning signal.

    Their rewards are all equal, or fewer than two apply.

    Args:
        rewards: `[n]` one scalar per completion; NaN = does not apply.
        groups: `[n]` group numbers from 0 to `count - 1`.
        count: Number of groups.

    Returns:
        `[count]` booleans.
    """
    statistics = group_statistics(rewards, ~rewards.isnan(), groups, count)
    return statistics.square == 0


def update_running_statistics(running: Tensor, rewards: Tensor, member_ids: Tensor) -> Tensor:
    """Add rewards to the running statistics of their members.

    Args:
        running: `[p, 3]` float64: number of rewards, their mean and their sum of squared distances
            from it; 0 at first.
        rewards: `[n]`; NaN = does not apply.
        member_ids: `[n]` row of each reward's member in `running`.

    Returns:
        `[p, 3]` new statistics; those of members without rewards are unchanged.

    Source: Chan, Golub and LeVeque (1983), equation 2.1.
    """
    # Merge two sets: each mean counts by its number of values, and the sum of squares gets a term
    # for the distance between the two means.
    count, mean, square = running.unbind(1)
    new = group_statistics(rewards, ~rewards.isnan(), member_ids, len(running))
    total = count + new.amount
    share = new.amount / total.clamp(min=1)
    distance = new.mean - mean
    merged_mean = mean + distance * share
    between = distance**2 * count * share
    merged_square = square + new.square + between
    merged = torch.stack([total, merged_mean, merged_square], 1)
    return torch.where(new.amount[:, None] > 0, merged, running)


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    r"""Return a penalty on long completions: 0 up to max - buffer, then linearly to -1 at max.

    Args:
        lengths: `[n]` actions of each completion.
        max_length: Number of actions from which the penalty is -1.
        buffer: Number of actions before `max_length` over which the penalty grows, from 1 to
            `max_length`.

    Returns:
        `[n]` float32 in [-1, 0], to be added to the rewards.

    Raises:
        ValueError: If the buffer is outside [1, max_length].

    Source: DAPO (arXiv:2503.14476), equation 13.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(
            f"overlong_buffer must be from 1 to the maximum length ({max_length}), got {buffer}."
        )
    begin = max_length - buffer
    return -((lengths.float() - begin) / buffer).clamp(0.0, 1.0)


def place_on_last_action(rewards: Tensor, mask: Tensor) -> Tensor:
    """Place each completion's reward on its last counted action.

    Args:
        rewards: `[n]` one scalar per completion.
        mask: `[n, t]` booleans, True = counts.

    Returns:
        `[n, t]` step rewards; NaN (no reward is given here) for all other actions.
    """
    # Counted actions from each action to the end, itself included.
    actions_left = mask.flip(1).cumsum(1).flip(1)
    is_last = mask & (actions_left == 1)
    return torch.where(is_last, rewards[:, None], torch.nan)
