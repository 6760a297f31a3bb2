"""Returns-to-go of step rewards, and the advantages that compare them within a group."""

import torch
from torch import Tensor

from evogrpo.functional.statistics import group_statistics, numbered_groups

Coefficient = float | Tensor


def returns_to_go(step_rewards: Tensor, mask: Tensor, gamma: Coefficient = 1.0) -> Tensor:
    r"""Add up the discounted rewards from every action to the end: G_t = sum over u >= t of gamma^(u - t) r_u.

    Only counted actions age a reward: what stands between them (tool output, observations) is not a step.

    Args:
        step_rewards: `[n, t]`; NaN, and anything where the mask is False, adds nothing.
        mask: `[n, t]` booleans, True = counts.
        gamma: Discount per action, in [0, 1]; a float or `[n, 1]`.

    Returns:
        `[n, t]` in reward units; 0 where the mask is False.

    Source: Sutton and Barto (2018), equation 3.8.
    """
    totals = _carried_returns(step_rewards, mask, gamma)
    return torch.where(mask, totals, 0.0).to(step_rewards.dtype)


def _carried_returns(step_rewards: Tensor, mask: Tensor, gamma: Coefficient) -> Tensor:
    """Return G_t in float64, `[n, t]`: at uncounted actions that of the next counted one, 0 after the last."""
    totals = torch.where(mask & ~step_rewards.isnan(), step_rewards.double(), 0.0)
    discount = torch.as_tensor(gamma, dtype=torch.float64, device=mask.device)
    decays = torch.where(mask, discount, 1.0)
    span, width = 1, mask.shape[1]
    while span < width:
        # `totals[:, t]` covers the columns t to t + span - 1, `decays[:, t]` discounts over them: double both.
        ahead = slice(span, None)
        totals[:, :-span] = totals[:, :-span] + decays[:, :-span] * totals[:, ahead]
        decays[:, :-span] = decays[:, :-span] * decays[:, ahead]
        span *= 2
    return totals


def normalised_step_rewards(step_rewards: Tensor, mask: Tensor, group_ids: Tensor, eps: float = 1e-4) -> Tensor:
    r"""Standardise every step reward against all step rewards of its group: (r - mean_g) / (std_g + eps).

    Advantage "process" adds them up ahead. When every step earns the same (CartPole, MountainCar) this is 0 everywhere,
    and nothing can be learnt from it.

    Args:
        step_rewards: `[n, t]`; NaN = no reward is given here. For a language model rewards stand at the ends of
            reasoning steps; a 0 elsewhere would count as a reward of 0 and shift the mean.
        mask: `[n, t]` booleans, True = counts.
        group_ids: `[n]`.
        eps: Added to the sample standard deviation, in reward units.

    Returns:
        `[n, t]`, dimensionless; NaN where no reward is given. Exactly 0 where all of a group's step rewards are equal.

    Raises:
        ValueError: If a group has fewer than 2 completions.

    Source: DeepSeekMath (arXiv:2402.03300), section 4.1.3.
    """
    group, groups = numbered_groups(group_ids)
    every = group[:, None].expand_as(mask)
    applies = mask & ~step_rewards.isnan()
    statistics = group_statistics(step_rewards, applies, every, groups)
    standard = (step_rewards.double() - statistics.mean[every]) / (statistics.std[every] + eps)
    return torch.where(applies, standard, torch.nan).to(step_rewards.dtype)


def return_to_go_group(
    step_rewards: Tensor, mask: Tensor, group_ids: Tensor, gamma: Coefficient = 1.0, eps: float = 1e-4
) -> Tensor:
    r"""Standardise every return-to-go against those of all counted actions of its group.

    A perfect episode cut off by a time limit still ends in small returns, so its tail scores below the mean; nothing
    here estimates what would have followed. `return_to_go_timestep` does not suffer from that.

    Args:
        step_rewards: `[n, t]`; NaN = no reward is given here; a row of NaN does not apply.
        mask: `[n, t]` booleans, True = counts.
        group_ids: `[n]`.
        gamma: Discount per action, in [0, 1]; a float or `[n, 1]`.
        eps: Added to the sample standard deviation, in reward units.

    Returns:
        `[n, t]`, dimensionless; 0 where the mask is False.

    Raises:
        ValueError: If a group has fewer than 2 completions.

    Source: the GRPO proposal for SB3-contrib, third variant.
    """
    group, groups = numbered_groups(group_ids)
    every = group[:, None].expand_as(mask)
    totals = _carried_returns(step_rewards, mask, gamma)
    applies = mask & _rewarded(step_rewards, mask)
    statistics = group_statistics(totals, applies, every, groups)
    standard = (totals - statistics.mean[every]) / (statistics.std[every] + eps)
    return torch.where(applies, standard, 0.0).to(step_rewards.dtype)


def return_to_go_timestep(
    step_rewards: Tensor, mask: Tensor, group_ids: Tensor, gamma: Coefficient = 1.0, eps: float = 1e-4
) -> Tensor:
    r"""Standardise every return-to-go against those of its group at the same time step.

    An episode that has ended stays in the comparison with a return of 0, as in an absorbing state: outliving the
    others is worth what it earns. Arguments and result are those of `return_to_go_group`.

    Source: code of the GRPO proposal for SB3-contrib.
    """
    group, groups = numbered_groups(group_ids)
    width = mask.shape[1]
    cell = group[:, None] * width + torch.arange(width, device=mask.device)
    totals = _carried_returns(step_rewards, mask, gamma)
    applies = _rewarded(step_rewards, mask).expand_as(mask)
    statistics = group_statistics(totals, applies, cell, groups * width)
    standard = (totals - statistics.mean[cell]) / (statistics.std[cell] + eps)
    return torch.where(applies & mask, standard, 0.0).to(step_rewards.dtype)


def _rewarded(step_rewards: Tensor, mask: Tensor) -> Tensor:
    """Return a mask `[n, 1]` of rows with at least one reward."""
    return (mask & ~step_rewards.isnan()).any(1, keepdim=True)
