"""Transformations of rewards between the reward function and the advantage."""

import torch
from torch import Tensor

from evogrpo.config.loss_types import REWARD_NORMS
from evogrpo.functional.statistics import GroupStatistics, group_statistics, numbered


def clip_rewards(rewards: Tensor, bound: float) -> Tensor:
    """Bound the absolute value of rewards.

    Args:
        rewards: Any shape; NaN stays NaN.
        bound: At least 0, in the unit of the rewards.

    Returns:
        Rewards of the same shape.

    Source: ROLL, `reward_clip`.
    """
    return rewards.clamp(-bound, bound)


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
        norm: Whose mean and sample deviation: "group" (the completion's group), "batch" (all rewards of its member)
            or "running" (all that its member has ever had, these included: see `update_running`).
        group_ids: `[n]`.
        member_ids: `[n]`; with "running", rows of `running`.
        running: `[p, 3]` float64, what `update_running` returned; needed by "running" only.
        shift: Subtract the mean only.
        scale: Divide by the deviation only; rewards that do not differ stay as they are.
        eps: Added to the standard deviation, in reward units.

    Returns:
        `[n]` in the dtype of `rewards`.

    Raises:
        ValueError: If both `shift` and `scale` are set, `norm` is unknown, or `running` is missing.

    Source: ROLL, `reward_norm`, `reward_shift` and `reward_scale`.
    """
    if shift and scale:
        raise ValueError("reward_shift and reward_scale exclude each other: leave both out to shift and to scale")
    if norm == "running":
        if running is None:
            raise ValueError("running normalisation needs the running statistics of every member")
        group, statistics = member_ids, GroupStatistics(*running.unbind(1))
    elif norm in REWARD_NORMS:
        group, groups = numbered(group_ids if norm == "group" else member_ids)
        statistics = group_statistics(rewards, ~rewards.isnan(), group, groups)
    else:
        raise ValueError(f"reward_norm must be one of {', '.join(REWARD_NORMS)}, got {norm!r}")
    values = rewards.double()
    if not scale:
        values = values - statistics.mean[group]
    if not shift:
        std = statistics.std[group]
        # Dividing a common value by eps alone would multiply it by thousands.
        values = torch.where(std > 0, values / (std + eps), values)
    return values.to(rewards.dtype)


def groups_within(rewards: Tensor, group_ids: Tensor, low: float | None, high: float | None) -> Tensor:
    """Return a mask of completions in groups that are neither too hard nor too easy: low < mean reward < high.

    Args:
        rewards: `[n]`; NaN = does not apply, and is left out of the mean.
        group_ids: `[n]`.
        low: In reward units; None = no bound.
        high: The same.

    Returns:
        `[n]` booleans; True where no reward of a group applies.

    Source: ROLL, `difficulty_mask`.
    """
    group, groups = numbered(group_ids)
    statistics = group_statistics(rewards, ~rewards.isnan(), group, groups)
    inside = torch.ones(groups, dtype=torch.bool, device=rewards.device)
    if low is not None:
        inside &= statistics.mean > low
    if high is not None:
        inside &= statistics.mean < high
    return (inside | (statistics.amount == 0))[group]


def update_running(running: Tensor, rewards: Tensor, member_ids: Tensor) -> Tensor:
    """Add rewards to the running statistics of their members.

    Args:
        running: `[p, 3]` float64: how many rewards, their mean, their sum of squared distances from it; 0 at first.
        rewards: `[n]`; NaN = does not apply.
        member_ids: `[n]` rows of `running`.

    Returns:
        `[p, 3]` new statistics; those of members without rewards are unchanged.

    Source: Chan, Golub and LeVeque (1983), equation 2.1.
    """
    count, mean, square = running.unbind(1)
    new = group_statistics(rewards, ~rewards.isnan(), member_ids, len(running))
    total = count + new.amount
    share = new.amount / total.clamp(min=1)
    distance = new.mean - mean
    merged = torch.stack([total, mean + distance * share, square + new.square + distance**2 * count * share], 1)
    return torch.where(new.amount[:, None] > 0, merged, running)


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    r"""Punish completions that come close to the length limit: 0 up to max - buffer, then linearly to -1 at max.

    Args:
        lengths: `[n]` actions of each completion.
        max_length: The length from which the whole penalty is due, in actions.
        buffer: Length of the ramp before it, in actions, from 1 to `max_length`.

    Returns:
        `[n]` float32 in [-1, 0], to be added to the rewards.

    Raises:
        ValueError: If the buffer is outside [1, max_length].

    Source: DAPO (arXiv:2503.14476), equation 13.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"the overlong buffer must lie in [1, {max_length}], the maximum length, got {buffer}")
    return -((lengths.float() - (max_length - buffer)) / buffer).clamp(0.0, 1.0)


def place_on_actions(rewards: Tensor, mask: Tensor) -> Tensor:
    """Place each completion's reward on its last counted action.

    Args:
        rewards: `[n]`.
        mask: `[n, t]` booleans, True = counts.

    Returns:
        `[n, t]` step rewards; NaN ("no reward is given here") at every other place.
    """
    ahead = mask.flip(1).cumsum(1).flip(1)
    return torch.where(mask & (ahead == 1), rewards[:, None], torch.nan)


def penalise_kl(step_rewards: Tensor, penalty: Tensor, mask: Tensor) -> Tensor:
    """Subtract a penalty from the reward of every action: r_t - beta kl_t.

    Args:
        step_rewards: `[n, t]`; NaN = no reward is given here, which counts as 0 from now on.
        penalty: `[n, t]` beta times an estimate of the KL divergence to the reference, without gradient.
        mask: `[n, t]` booleans, True = counts.

    Returns:
        `[n, t]` step rewards. NaN where the mask is False, and in rows without any reward: no reward applies to them,
        and a penalty alone does not make one.

    Source: Ziegler et al. (arXiv:1909.08593), equation 2; ROLL, `add_token_level_kl`.
    """
    applies = mask & (mask & ~step_rewards.isnan()).any(1, keepdim=True)
    return torch.where(applies, step_rewards.nan_to_num(nan=0.0) - penalty, torch.nan)
