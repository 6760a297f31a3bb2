"""Group-relative advantages of completions and of single actions."""

import torch
from torch import Tensor

from evogrpo.functional.loss_types import ADVANTAGES
from evogrpo.functional.rewards import (
    comparable_groups,
    consecutive_ids,
    group_statistics,
    place_on_last_action,
)


def advantages(
    kind: str,
    *,
    rewards: Tensor,
    group_ids: Tensor,
    member_ids: Tensor,
    mask: Tensor,
    step_rewards: Tensor | None = None,
    components: Tensor | None = None,
    component_weights: Tensor | None = None,
    gamma: float | Tensor = 1.0,
    eps: float = 1e-4,
    kl_penalty: Tensor | None = None,
    reward_clip: float | None = None,
    whiten_advantages: bool = False,
    in_loss: Tensor | None = None,
    advantage_clip: float | Tensor | None = None,
) -> Tensor:
    """Return the advantage of every action, by the estimator named `kind`.

    The order is ROLL's: normalise in the group, `reward_clip`, place on the actions, subtract
    `kl_penalty`, `reward_clip`, discounted return, whiten, `advantage_clip`, mask. Estimators of
    whole completions place their advantage on the last action. At gamma 1 and without a penalty,
    all actions of a completion then have the same advantage. Only "return_to_go_group" and
    "return_to_go_timestep" normalise last, after the return, because they compare returns.

    Args:
        kind: One of `AdvantageType`.
        rewards: `[n]` total reward of each completion; NaN = does not apply.
        group_ids: `[n]` group of each completion; at least 2 completions each, except for
            "reinforce".
        member_ids: `[n]` member of each completion; batch statistics are computed for each member.
        mask: `[n, t]` booleans, True = counts.
        step_rewards: `[n, t]` reward of each action; NaN = no reward is given here. None =
            `rewards` at the last action. Read by the `STEP_ADVANTAGES` only.
        components: `[n, f]` value of each reward function, NaN = does not apply; read by "gdpo"
            only.
        component_weights: `[n, f]` weights of the reward functions for each row, equal within a
            group; None = all 1.
        gamma: Discount per action, in [0, 1]; a float or `[n, 1]`.
        eps: Added to every standard deviation, in reward units.
        kl_penalty: `[n, t]` beta times an estimate of the KL divergence to the reference, without
            gradient.
        reward_clip: Bound on the absolute value of a (normalised) reward; None = no bound.
        whiten_advantages: Standardise over all actions of a member that are in the loss and have a
            reward; gives groups of equal rewards an advantage.
        in_loss: `[n, t]` booleans, True = is in the loss, a part of `mask`; None = `mask`. Read by
            `whiten_advantages`.
        advantage_clip: Bound on the absolute value of advantages; a float or `[n, 1]`.

    Returns:
        `[n, t]` in the dtype of `rewards`; 0 where the mask is False and where no reward applies.

    Raises:
        ValueError: If "gdpo" gets no components, or a group that is compared has fewer than 2
            completions.
    """
    # Clamping to +-inf changes nothing.
    bound = torch.inf if reward_clip is None else reward_clip
    # 1. Compare rewards within their group, clip them, and place them on actions.
    if ADVANTAGES[kind] == "step rewards":
        if step_rewards is None:
            step_rewards = place_on_last_action(rewards, mask)
        steps = torch.where(mask, step_rewards, torch.nan)
        # A completion without any reward gets advantage 0 at the end.
        applies = ~steps.isnan().all(1)
        if kind == "process":
            steps = standardised_step_rewards(steps, mask, group_ids, eps)
        steps = steps.clamp(-bound, bound)
    elif kind == "gdpo":
        if components is None:
            raise ValueError(
                "advantage 'gdpo' needs the value of each reward function, got components=None."
            )
        applies = ~components.isnan().all(1)
        values = gdpo_advantages(components, component_weights, group_ids, member_ids, eps)
        steps = place_on_last_action(values.clamp(-bound, bound), mask)
    else:
        applies = ~rewards.isnan()
        values = _compared_rewards(kind, rewards, group_ids, member_ids, eps)
        steps = place_on_last_action(values.clamp(-bound, bound), mask)
    # 2. Subtract the KL penalty from each reward.
    if kl_penalty is not None:
        steps = subtract_kl(steps, kl_penalty, mask).clamp(-bound, bound)
    # 3. Sum the rewards of each action and of those after it.
    if kind == "return_to_go_group":
        result = group_return_advantages(steps, mask, group_ids, gamma, eps)
    elif kind == "return_to_go_timestep":
        result = timestep_return_advantages(steps, mask, group_ids, gamma, eps)
    else:
        result = returns_to_go(steps, mask, gamma)
    # 4. Whiten, clip and mask the advantages.
    if whiten_advantages:
        counted = mask if in_loss is None else in_loss
        result = whiten(result, counted & applies[:, None], member_ids)
    if advantage_clip is not None:
        result = result.clamp(min=-advantage_clip).clamp(max=advantage_clip)
    # Completions without a reward get advantage 0.
    counts = mask & applies[:, None]
    return torch.where(counts, result, 0.0).to(rewards.dtype)


# ---- advantages of completions


def _compared_rewards(
    kind: str, rewards: Tensor, group_ids: Tensor, member_ids: Tensor, eps: float
) -> Tensor:
    """Return the advantages `[n]` of whole completions; 0 where no reward applies."""
    if kind == "outcome":
        return group_advantages(rewards, group_ids, eps)
    if kind == "rloo":
        return leave_one_out_advantages(rewards, group_ids)
    if kind == "mean_only":
        return mean_centred_advantages(rewards, group_ids)
    if kind == "batch_std":
        return batch_std_advantages(rewards, group_ids, member_ids, eps)
    # Rewards as they are, without a baseline.
    assert kind == "reinforce"
    return torch.where(rewards.isnan(), 0.0, rewards)


def group_advantages(rewards: Tensor, group_ids: Tensor, eps: float = 1e-4) -> Tensor:
    r"""Standardise each reward within its group: (r - mean_g) / (std_g + eps).

    The standard deviation is the sample one (n - 1). A group whose rewards are all equal gets
    exactly 0.

    Args:
        rewards: `[n]` one scalar per completion; NaN = does not apply, and is left out of the
            statistics.
        group_ids: `[n]` group of each completion; any order, any group sizes.
        eps: Added to the standard deviation, in reward units.

    Returns:
        `[n]` advantages in the dtype of `rewards`, dimensionless; 0 for NaN rewards and for groups
        in which fewer than two rewards apply.

    Raises:
        ValueError: If a group has fewer than 2 completions.

    Source: DeepSeekMath (arXiv:2402.03300), section 4.1.2.
    """
    centred, std, _ = _centred(rewards, group_ids)
    return (centred / (std + eps)).to(rewards.dtype)


def mean_centred_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    r"""Subtract the group's mean: r - mean_g, in reward units; otherwise as `group_advantages`.

    Source: Dr. GRPO (arXiv:2503.20783).
    """
    return _centred(rewards, group_ids)[0].to(rewards.dtype)


def leave_one_out_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    r"""Subtract the mean of the group's other completions.

    r - mean of the others = g / (g - 1) (r - mean_g), in reward units; g counts the rewards that
    apply. Otherwise as `group_advantages`.

    Source: RLOO (arXiv:2402.14740).
    """
    centred, _, count = _centred(rewards, group_ids)
    # Where a single reward applies, `centred` is 0, so the divisor only has to differ from 0.
    factor = count / (count - 1).clamp(min=1)
    return (centred * factor).to(rewards.dtype)


def batch_std_advantages(
    rewards: Tensor, group_ids: Tensor, member_ids: Tensor, eps: float = 1e-4
) -> Tensor:
    r"""Subtract the group's mean, divide by the batch's deviation: (r - mean_g) / (std + eps).

    The batch is that of one member, `member_ids` `[n]`. Otherwise as `group_advantages`.

    Source: Lite PPO (arXiv:2508.08221).
    """
    centred, _, _ = _centred(rewards, group_ids)
    member, members = consecutive_ids(member_ids)
    statistics = group_statistics(rewards, ~rewards.isnan(), member, members)
    std = statistics.std[member]
    return (centred / (std + eps)).to(rewards.dtype)


def gdpo_advantages(
    components: Tensor,
    weights: Tensor | None,
    group_ids: Tensor,
    member_ids: Tensor,
    eps: float = 1e-4,
) -> Tensor:
    r"""Standardise each reward function within its group, then sum and divide by the deviation.

    The deviation is that of the sums. The range of a reward function then has no influence.

    Args:
        components: `[n, f]` one column per reward function; NaN = does not apply.
        weights: `[n, f]` weights of the reward functions for each completion, equal within a
            group; None = all 1.
        group_ids: `[n]` group of each completion, at least 2 completions each.
        member_ids: `[n]` member of each completion; the deviation of the sums is that of one
            member.
        eps: Added to every standard deviation.

    Returns:
        `[n]` advantages, dimensionless; 0 where no function applies.

    Source: GDPO (arXiv:2601.05242); "normalize_then_sum" in TRL.
    """
    # 1. Standardise each reward function, then sum.
    columns = components.double().unbind(1)
    standard_columns = [group_advantages(column, group_ids, eps) for column in columns]
    standard = torch.stack(standard_columns, 1)
    if weights is not None:
        standard = standard * weights.to(standard)
    total = standard.sum(1)
    # 2. Divide by the deviation of the sums over all groups of the member.
    member, members = consecutive_ids(member_ids)
    # Within a group the values of every function sum to 0, so the sums have mean 0.
    applies = ~components.isnan().all(1)
    statistics = group_statistics(total, applies, member, members)
    std = statistics.std[member]
    return (total / (std + eps)).to(components.dtype)


def _centred(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return distances from the group's mean (0 for NaN), and the group's deviation and count.

    All are `[n]` float64.
    """
    group, groups = comparable_groups(group_ids)
    applies = ~rewards.isnan()
    statistics = group_statistics(rewards, applies, group, groups)
    distances = rewards.double() - statistics.mean[group]
    centred = torch.where(applies, distances, 0.0)
    return centred, statistics.std[group], statistics.amount[group]


# ---- advantages of actions


def returns_to_go(step_rewards: Tensor, mask: Tensor, gamma: float | Tensor = 1.0) -> Tensor:
    r"""Return the discounted sum of rewards from each action to the end.

    G_t = sum over u >= t of gamma^(u - t) r_u. Only counted actions are discounted; tokens between
    them (tool output, observations) are not steps.

    Args:
        step_rewards: `[n, t]`; NaN, and all values where the mask is False, count as 0.
        mask: `[n, t]` booleans, True = counts.
        gamma: Discount per action, in [0, 1]; a float or `[n, 1]`.

    Returns:
        `[n, t]` in reward units; 0 where the mask is False.

    Source: Sutton and Barto (2018), equation 3.8.
    """
    totals = _returns(step_rewards, mask, gamma)
    return torch.where(mask, totals, 0.0).to(step_rewards.dtype)


def _returns(step_rewards: Tensor, mask: Tensor, gamma: float | Tensor) -> Tensor:
    """Return G_t `[n, t]` in float64.

    At an uncounted action it is that of the next counted one, or 0 after the last.
    """
    rewarded = mask & ~step_rewards.isnan()
    totals = torch.where(rewarded, step_rewards.double(), 0.0)
    discount = torch.as_tensor(gamma, dtype=torch.float64, device=mask.device)
    decays = torch.where(mask, discount, 1.0)
    span = 1
    width = mask.shape[1]
    while span < width:
        # Doubling: log2(t) passes over the matrix instead of t steps from right to left.
        # `totals[:, t]` sums the columns t to t + span - 1, and `decays[:, t]` is the product of
        # their discounts. Each pass doubles the span.
        ahead = slice(span, None)
        later_rewards = decays[:, :-span] * totals[:, ahead]
        totals[:, :-span] += later_rewards
        # Computed before it is stored, as the columns that are read and written overlap.
        longer = decays[:, :-span] * decays[:, ahead]
        decays[:, :-span] = longer
        span *= 2
    return totals


def standardised_step_rewards(
    step_rewards: Tensor, mask: Tensor, group_ids: Tensor, eps: float = 1e-4
) -> Tensor:
    r"""Standardise step rewards over all of their group: (r - mean_g) / (std_g + eps).

    The advantage "process" is their return-to-go. It is 0 everywhere if all steps earn the same
    (CartPole, MountainCar).

    Args:
        step_rewards: `[n, t]`; NaN = no reward is given here. Language models have rewards at the
            ends of reasoning steps; a 0 at other tokens would count as a reward of 0 and shift the
            mean.
        mask: `[n, t]` booleans, True = counts.
        group_ids: `[n]` group of each completion.
        eps: Added to the sample standard deviation, in reward units.

    Returns:
        `[n, t]`, dimensionless; NaN where no reward is given. Exactly 0 where all of a group's step
        rewards are equal.

    Raises:
        ValueError: If a group has fewer than 2 completions.

    Source: DeepSeekMath (arXiv:2402.03300), section 4.1.3.
    """
    group, groups = comparable_groups(group_ids)
    group_of_action = group[:, None].expand_as(mask)
    applies = mask & ~step_rewards.isnan()
    standard = _standardised(step_rewards, applies, group_of_action, groups, eps)
    return torch.where(applies, standard, torch.nan).to(step_rewards.dtype)


def group_return_advantages(
    step_rewards: Tensor,
    mask: Tensor,
    group_ids: Tensor,
    gamma: float | Tensor = 1.0,
    eps: float = 1e-4,
) -> Tensor:
    r"""Standardise every return-to-go over all counted actions of its group.

    A perfect episode that a time limit cuts off still ends in small returns, so its last actions
    score below the mean. `timestep_return_advantages` has no such bias.

    Args:
        step_rewards: `[n, t]`; NaN = no reward is given here; a row of NaN does not apply.
        mask: `[n, t]` booleans, True = counts.
        group_ids: `[n]` group of each completion.
        gamma: Discount per action, in [0, 1]; a float or `[n, 1]`.
        eps: Added to the sample standard deviation, in reward units.

    Returns:
        `[n, t]`, dimensionless; 0 where the mask is False.

    Raises:
        ValueError: If a group has fewer than 2 completions.

    Source: the GRPO proposal for SB3-contrib, third variant.
    """
    group, groups = comparable_groups(group_ids)
    group_of_action = group[:, None].expand_as(mask)
    totals = _returns(step_rewards, mask, gamma)
    has_reward = (mask & ~step_rewards.isnan()).any(1, keepdim=True)
    applies = mask & has_reward
    standard = _standardised(totals, applies, group_of_action, groups, eps)
    return torch.where(applies, standard, 0.0).to(step_rewards.dtype)


def timestep_return_advantages(
    step_rewards: Tensor,
    mask: Tensor,
    group_ids: Tensor,
    gamma: float | Tensor = 1.0,
    eps: float = 1e-4,
) -> Tensor:
    r"""Standardise every return-to-go over the group's returns at the same time step.

    An episode that has ended is compared with a return of 0, as in an absorbing state. Arguments
    and result are those of `group_return_advantages`.

    Source: code of the GRPO proposal for SB3-contrib.
    """
    # Each time step of a group is a group of its own.
    group, groups = comparable_groups(group_ids)
    width = mask.shape[1]
    time_step = torch.arange(width, device=mask.device)
    group_of_action = group[:, None] * width + time_step
    totals = _returns(step_rewards, mask, gamma)
    # Also steps after an episode's end, with their return of 0, unless no reward applies to it.
    rewarded = mask & ~step_rewards.isnan()
    applies = rewarded.any(1, keepdim=True).expand_as(mask)
    standard = _standardised(totals, applies, group_of_action, groups * width, eps)
    return torch.where(applies & mask, standard, 0.0).to(step_rewards.dtype)


def _standardised(
    values: Tensor, applies: Tensor, group_of_action: Tensor, groups: int, eps: float
) -> Tensor:
    """Standardise values within their groups: (value - mean_g) / (std_g + eps).

    Args:
        values: `[n, t]`.
        applies: `[n, t]` True for values that count in the mean and the standard deviation.
        group_of_action: `[n, t]` group number of each value, from 0.
        groups: Number of groups.
        eps: Added to the sample standard deviation.

    Returns:
        `[n, t]` float64; meaningless where `applies` is False.
    """
    statistics = group_statistics(values, applies, group_of_action, groups)
    centred = values.double() - statistics.mean[group_of_action]
    return centred / (statistics.std[group_of_action] + eps)


def whiten(values: Tensor, mask: Tensor, member_ids: Tensor) -> Tensor:
    r"""Standardise over all counted actions of each member: (A - mean) / sqrt(variance + 1e-8).

    Long completions weigh more in the mean, so groups of equal rewards get an advantage other than
    0.

    Args:
        values: `[n, t]` advantages.
        mask: `[n, t]` booleans, True = counts.
        member_ids: `[n]` member of each completion.

    Returns:
        `[n, t]`; 0 where the mask is False.

    Source: ROLL, `whiten_advantages` (sample variance, n - 1).
    """
    member, members = consecutive_ids(member_ids)
    member_of_action = member[:, None].expand_as(mask)
    statistics = group_statistics(values, mask, member_of_action, members)
    centred = values.double() - statistics.mean[member_of_action]
    # ROLL adds epsilon to the variance, not to the deviation.
    deviation = (statistics.std[member_of_action] ** 2 + 1e-8).sqrt()
    return torch.where(mask, centred / deviation, 0.0).to(values.dtype)


def subtract_kl(step_rewards: Tensor, penalty: Tensor, mask: Tensor) -> Tensor:
    """Subtract a KL penalty from the reward of every action: r_t - beta kl_t.

    Args:
        step_rewards: `[n, t]`; NaN = no reward is given here, which counts as 0.
        penalty: `[n, t]` beta times an estimate of the KL divergence to the reference, without
            gradient.
        mask: `[n, t]` booleans, True = counts.

    Returns:
        `[n, t]` step rewards; NaN where the mask is False, and in rows to which no reward applies.

    Source: Ziegler et al. (arXiv:1909.08593), equation 2; ROLL, `add_token_level_kl`.
    """
    has_reward = (mask & ~step_rewards.isnan()).any(1, keepdim=True)
    applies = mask & has_reward
    return torch.where(applies, step_rewards.nan_to_num(nan=0.0) - penalty, torch.nan)
