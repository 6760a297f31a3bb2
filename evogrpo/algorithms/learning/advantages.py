"""Advantages of a batch by each member's objective, and checks of rewards and objectives."""

import torch
from torch import Tensor

from evogrpo.algorithms.learning.action_loss import RowHyperparameters
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.objective import Objective
from evogrpo.config.search_space import HyperparameterConfig
from evogrpo.data import Batch
from evogrpo.functional.advantages import advantages
from evogrpo.functional.loss_types import LOSS_TYPES, STEP_ADVANTAGES
from evogrpo.functional.rewards import (
    consecutive_ids,
    normalise_rewards,
    update_running_statistics,
    zero_variance_groups,
)
from evogrpo.warnings import warn


def check_action_objective(objective: Objective) -> None:
    """Require an objective that works on single actions, as small networks learn them.

    Raises:
        ValueError: If the loss is not a plain mean over actions, or the advantage needs several reward functions.
    """
    if objective.advantage == "gdpo":
        raise ValueError(
            "advantage='gdpo' needs several reward functions, but an environment has one reward. Choose "
            "'return_to_go_timestep' or 'outcome'."
        )
    loss_type, aggregation = objective.loss_type, objective.aggregation or LOSS_TYPES[objective.loss_type].aggregation
    if not LOSS_TYPES[loss_type].per_action:
        raise ValueError(f"loss_type={loss_type!r} needs whole completions. Choose 'dapo', 'bnpo' or 'cispo'.")
    if aggregation != "token-mean":
        raise ValueError(
            f"loss_type={loss_type!r} with aggregation={aggregation!r} needs whole completions. Choose "
            "'dapo', 'bnpo' or 'cispo', or aggregation='token-mean'."
        )


def check_hyperparameters(
    objective: Objective, hyperparameters: Hyperparameters, space: HyperparameterConfig | None, *, per_action: bool
) -> None:
    """Require hyperparameters that fit the objective, now and after any mutation.

    Args:
        objective: The population's objective.
        hyperparameters: The member's hyperparameters.
        space: The search space; None = nothing evolves.
        per_action: True if members learn from single actions, as small networks do.

    Raises:
        ValueError: See `Objective.check_member` and `check_action_objective`.
    """
    objective.check_member(hyperparameters, space)
    if per_action:
        for name in ("loss_type", "advantage"):
            for kind in (getattr(hyperparameters, name), *(space[name].names if space and name in space else ())):
                check_action_objective(objective.with_types(**{name: kind}))


def check_finite_rewards(batch: Batch) -> None:
    """Require rewards that are finite or NaN; NaN means that no reward applies.

    Raises:
        ValueError: If a reward is infinite. The message names the first row.
    """
    for name, values in (("rewards", batch.rewards), ("step rewards", batch.step_rewards)):
        infinite = None if values is None else values.isinf().reshape(len(values), -1).any(1)
        if infinite is not None and bool(infinite.any()):
            raise ValueError(
                f"{name} must be finite in float32, or NaN if none applies: {int(infinite.sum())} of {len(infinite)} "
                f"samples are infinite, first sample {int(infinite.nonzero()[0])}. Bound the reward function."
            )


def compute_advantages(
    batch: Batch, objective: Objective, per_row: RowHyperparameters, running_stats: Tensor, kl_penalty: Tensor | None
) -> Tensor:
    """Return the advantage of every action.

    Args:
        batch: Whole groups of whole episodes.
        objective: The run's objective; each member has its own advantage type.
        per_row: Hyperparameters of the batch's rows.
        running_stats: `[p, 6]` running statistics by slot; updated in place if `reward_norm` is "running".
        kl_penalty: `[n, t]` beta times KL, subtracted from rewards; None = KL is not in the rewards.

    Returns:
        `[n, t]` float32; 0 where `action_mask` is False.
    """
    rewards = batch.rewards
    if objective.reward_norm is not None:
        rewards = _normalised_rewards(batch, objective, running_stats)
    result = torch.zeros(batch.action_mask.shape, dtype=rewards.dtype, device=rewards.device)
    for kind, flag in per_row.advantages.items():
        rows = flag.nonzero()[:, 0]
        own, gamma, bound = batch.select(rows), per_row.gamma[rows], per_row.advantage_clip[rows]
        if kind in STEP_ADVANTAGES:
            _warn_equal_steps(kind, own)
        result[rows] = advantages(
            kind,
            rewards=rewards[rows],
            step_rewards=own.step_rewards,
            components=own.reward_components,
            component_weights=torch.tensor(own.component_weights) if own.component_weights else None,
            group_ids=own.group_ids,
            member_ids=own.member_ids,
            mask=_in_statistics(own) if kind in STEP_ADVANTAGES else own.action_mask,
            gamma=gamma,
            eps=objective.advantage_eps,
            kl_penalty=None if kl_penalty is None else kl_penalty[rows],
            reward_clip=objective.reward_clip,
            whiten_advantages=objective.whiten_advantages,
            advantage_clip=bound if bool(bound.isfinite().any()) else None,
        )
    return torch.where(batch.action_mask, result, 0.0)


def _normalised_rewards(batch: Batch, objective: Objective, running_stats: Tensor) -> Tensor:
    assert objective.reward_norm is not None
    running = None
    if objective.reward_norm == "running":
        statistics = running_stats[:, 1:4]  # a view: count, mean and sum of squares
        statistics[:] = update_running_statistics(statistics, batch.rewards.cpu(), batch.member_ids.cpu())
        running = statistics.to(batch.rewards.device)
    return normalise_rewards(
        batch.rewards,
        objective.reward_norm,
        group_ids=batch.group_ids,
        member_ids=batch.member_ids,
        running=running,
        shift=objective.reward_shift,
        scale=objective.reward_scale,
        eps=objective.advantage_eps,
    )


def _in_statistics(batch: Batch) -> Tensor:
    """Return `[n, t]` actions that enter group statistics, including those of episodes masked out of the loss.

    Leaving an episode out of the loss (a truncated completion, say) must not change the mean that others compare with.
    """
    left_out = ~batch.action_mask.any(1, keepdim=True)
    return batch.action_mask | (batch.chosen & left_out)


def _warn_equal_steps(kind: str, batch: Batch) -> None:
    """Warn if advantage 'process' is 0 everywhere because every step earned the same."""
    if kind != "process" or batch.step_rewards is None:
        return
    step_rewards = batch.step_rewards[_in_statistics(batch) & ~batch.step_rewards.isnan()]
    group, count = consecutive_ids(batch.group_ids)
    differ = not bool(zero_variance_groups(batch.rewards, group, count).all())
    if differ and len(step_rewards) and bool(step_rewards.min() == step_rewards.max()):
        warn(
            f"Every step earned {float(step_rewards[0]):g}, so advantage='process' is 0 everywhere and nothing is "
            "learnt. Choose 'return_to_go_timestep' or 'outcome'.",
            rank_zero_only=False,
        )
