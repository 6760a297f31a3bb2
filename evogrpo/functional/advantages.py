"""Group-relative advantages: how a completion's reward, or the rewards ahead of an action, compare with its group."""

import torch
from torch import Tensor

from evogrpo.config.loss_types import ADVANTAGES
from evogrpo.functional.returns import (
    normalised_step_rewards,
    return_to_go_group,
    return_to_go_timestep,
    returns_to_go,
)
from evogrpo.functional.reward_shaping import clip_rewards, penalise_kl, place_on_actions
from evogrpo.functional.statistics import group_statistics, numbered, numbered_groups

Coefficient = float | Tensor


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
    gamma: Coefficient = 1.0,
    eps: float = 1e-4,
    kl_penalty: Tensor | None = None,
    reward_clip: float | None = None,
    whiten_advantages: bool = False,
    advantage_clip: Coefficient | None = None,
) -> Tensor:
    """Return the advantage of every action, by the estimator named `kind`.

    The order is ROLL's: normalise in the group, `reward_clip`, place on the actions, subtract `kl_penalty`,
    `reward_clip`, discounted return, whiten, mask, `advantage_clip`. Estimators of whole completions place their
    advantage on the last action, so at gamma 1 and without penalty every action of a completion has the same. Only
    "return_to_go_group" and "return_to_go_timestep" normalise last, after the return: they compare returns.

    Args:
        kind: One of `AdvantageType`.
        rewards: `[n]` total reward of each completion; NaN = does not apply.
        group_ids: `[n]` which group each completion belongs to; at least 2 of each, but for "reinforce".
        member_ids: `[n]` whose completion it is; statistics of a batch are taken for each member apart.
        mask: `[n, t]` booleans, True = counts.
        step_rewards: `[n, t]` reward earned at each action; NaN = no reward is given here. None: `rewards`, at the
            last action. Read by the `STEP_ADVANTAGES` only.
        components: `[n, f]` the reward functions apart, NaN = does not apply; needed by "gdpo", read by it only.
        component_weights: `[f]`; None = all 1.
        gamma: Discount per action, in [0, 1]; a float or `[n, 1]`.
        eps: Added to every standard deviation, in reward units.
        kl_penalty: `[n, t]` beta times an estimate of the KL divergence to the reference, without gradient.
        reward_clip: Bound of the absolute value of a (normalised) reward.
        whiten_advantages: Standardise over all of a member's actions; gives groups of equal rewards an advantage.
        advantage_clip: Bound of the advantages' absolute value; a float or `[n, 1]`.

    Returns:
        `[n, t]` in the dtype of `rewards`; 0 where the mask is False and where no reward applies.

    Raises:
        ValueError: If `kind` is unknown, "gdpo" gets no components, or a group that is compared has fewer than 2
            completions.
    """
    if kind not in ADVANTAGES:
        raise ValueError(f"advantage must be one of {', '.join(ADVANTAGES)}, got {kind!r}")
    if ADVANTAGES[kind] == "step rewards":
        steps = place_on_actions(rewards, mask) if step_rewards is None else step_rewards
        steps = torch.where(mask, steps, torch.nan)
        applies = ~steps.isnan().all(1)
        if kind == "process":
            steps = normalised_step_rewards(steps, mask, group_ids, eps)
        steps = _clip(steps, reward_clip)
    else:
        if ADVANTAGES[kind] == "reward functions":
            if components is None:
                raise ValueError(f"{kind} normalises every reward function apart, so it needs the rewards of each")
            applies = ~components.isnan().all(1)
            values = gdpo(components, component_weights, group_ids, member_ids, eps)
        else:
            applies = ~rewards.isnan()
            values = _of_completions(kind, rewards, group_ids, member_ids, eps)
        steps = place_on_actions(_clip(values, reward_clip), mask)
    if kl_penalty is not None:
        steps = _clip(penalise_kl(steps, kl_penalty, mask), reward_clip)
    if kind == "return_to_go_group":
        result = return_to_go_group(steps, mask, group_ids, gamma, eps)
    elif kind == "return_to_go_timestep":
        result = return_to_go_timestep(steps, mask, group_ids, gamma, eps)
    else:
        result = returns_to_go(steps, mask, gamma)
    if whiten_advantages:
        result = whiten(result, mask, member_ids)
    if advantage_clip is not None:
        result = result.clamp(min=-advantage_clip).clamp(max=advantage_clip)
    return torch.where(mask & applies[:, None], result, 0.0).to(rewards.dtype)


def _of_completions(kind: str, rewards: Tensor, group_ids: Tensor, member_ids: Tensor, eps: float) -> Tensor:
    if kind == "outcome":
        return group_advantages(rewards, group_ids, eps)
    if kind == "rloo":
        return leave_one_out(rewards, group_ids)
    if kind == "mean_only":
        return mean_only(rewards, group_ids)
    if kind == "reinforce":
        return reinforce(rewards)
    return batch_std(rewards, group_ids, member_ids, eps)


def _clip(values: Tensor, bound: float | None) -> Tensor:
    return values if bound is None else clip_rewards(values, bound)


def group_advantages(rewards: Tensor, group_ids: Tensor, eps: float = 1e-4) -> Tensor:
    r"""Standardise each reward against its own group: (r - mean_g) / (std_g + eps).

    The standard deviation is the sample one (n - 1). A group whose rewards are all equal gets exactly 0.

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
    centred, std, _ = _against_group(rewards, group_ids)
    return (centred / (std + eps)).to(rewards.dtype)


def mean_only(rewards: Tensor, group_ids: Tensor) -> Tensor:
    r"""Subtract the group's mean and divide by nothing: r - mean_g, in reward units; otherwise as `group_advantages`.

    Source: Dr. GRPO (arXiv:2503.20783).
    """
    return _against_group(rewards, group_ids)[0].to(rewards.dtype)


def leave_one_out(rewards: Tensor, group_ids: Tensor) -> Tensor:
    r"""Subtract the mean of the other completions of the group: r - mean of the rest = g / (g - 1) (r - mean_g).

    In reward units; rewards of NaN do not count in g. Otherwise as `group_advantages`.

    Source: RLOO (arXiv:2402.14740).
    """
    centred, _, count = _against_group(rewards, group_ids)
    return (centred * (count / (count - 1).clamp(min=1))).to(rewards.dtype)


def reinforce(rewards: Tensor) -> Tensor:
    r"""Take each reward as it is, compared with nothing: r, in reward units, and 0 for NaN.

    Source: Williams, "Simple statistical gradient-following algorithms" (1992), without a baseline.
    """
    return torch.where(rewards.isnan(), 0.0, rewards)


def batch_std(rewards: Tensor, group_ids: Tensor, member_ids: Tensor, eps: float = 1e-4) -> Tensor:
    r"""Centre on the group's mean and divide by the member's whole batch: (r - mean_g) / (std_batch + eps).

    `member_ids`, `[n]`, say whose completion each is: the deviation is of all the member's rewards. Otherwise as
    `group_advantages`.

    Source: Lite PPO (arXiv:2508.08221).
    """
    centred, _, _ = _against_group(rewards, group_ids)
    member, members = numbered(member_ids)
    std = group_statistics(rewards, ~rewards.isnan(), member, members).std[member]
    return (centred / (std + eps)).to(rewards.dtype)


def gdpo(
    components: Tensor, weights: Tensor | None, group_ids: Tensor, member_ids: Tensor, eps: float = 1e-4
) -> Tensor:
    r"""Standardise every reward function in its group, add them up, and divide by the deviation of the sums.

    A reward function with a wide range then has no more say than one with a narrow range.

    Args:
        components: `[n, f]` one column per reward function; NaN = does not apply.
        weights: `[f]`; None = all 1.
        group_ids: `[n]`, at least 2 of each, as in `group_advantages`.
        member_ids: `[n]` whose completion each is; the deviation of the sums is taken for each member apart.
        eps: Added to every standard deviation.

    Returns:
        `[n]` advantages, dimensionless; 0 where no function applies.

    Source: GDPO (arXiv:2601.05242); "normalize_then_sum" in TRL.
    """
    standard = torch.stack([group_advantages(column, group_ids, eps) for column in components.double().unbind(1)], 1)
    total = standard.sum(1) if weights is None else standard @ weights.to(standard)
    member, members = numbered(member_ids)
    # The mean of the sums needs no subtraction: within a group the values of every function add up to 0.
    std = group_statistics(total, ~components.isnan().all(1), member, members).std[member]
    return (total / (std + eps)).to(components.dtype)


def whiten(values: Tensor, mask: Tensor, member_ids: Tensor) -> Tensor:
    r"""Standardise over all counted actions of each member: (A - mean) / sqrt(variance + 1e-8).

    The mean weighs long completions more, so groups of equal rewards get an advantage that is not 0.

    Args:
        values: `[n, t]` advantages.
        mask: `[n, t]` booleans, True = counts.
        member_ids: `[n]`.

    Returns:
        `[n, t]`; 0 where the mask is False.

    Source: ROLL, `whiten_advantages` (sample variance, n - 1).
    """
    member, members = numbered(member_ids)
    every = member[:, None].expand_as(mask)
    statistics = group_statistics(values, mask, every, members)
    centred = values.double() - statistics.mean[every]
    return torch.where(mask, centred / (statistics.std[every] ** 2 + 1e-8).sqrt(), 0.0).to(values.dtype)


def zero_variance_groups(rewards: Tensor, groups: Tensor, count: int) -> Tensor:
    """Return a mask of groups without learning signal: rewards are all equal, or fewer than two apply.

    Args:
        rewards: `[n]` one scalar per completion; NaN = does not apply.
        groups: `[n]` group numbers from 0 to `count - 1`.
        count: Number of groups.

    Returns:
        `[count]` booleans.
    """
    applies = ~rewards.isnan()
    low = torch.full((count,), torch.inf, dtype=rewards.dtype, device=rewards.device)
    low = low.scatter_reduce(0, groups[applies], rewards[applies], "amin")
    high = torch.full_like(low, -torch.inf).scatter_reduce(0, groups[applies], rewards[applies], "amax")
    return low >= high


def _against_group(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return, all `[n]` float64: distance from the group's mean (0 for NaN), the group's deviation and its count."""
    group, groups = numbered_groups(group_ids)
    applies = ~rewards.isnan()
    statistics = group_statistics(rewards, applies, group, groups)
    centred = torch.where(applies, rewards.double() - statistics.mean[group], 0.0)
    return centred, statistics.std[group], statistics.amount[group]
