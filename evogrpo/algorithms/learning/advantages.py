"""From rewards to advantages, in the order of `Objective`: every member's from its own rows and statistics."""

from dataclasses import replace

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
    difficulty_mask,
    normalise_rewards,
    update_running_statistics,
    zero_variance_groups,
)
from evogrpo.interruption import before_changes
from evogrpo.warnings import warn


def check_action_objective(objective: Objective) -> None:
    """Refuse an objective that cannot learn from single transitions.

    Raises:
        ValueError: If its loss is not a plain mean over actions: episodes are taken apart before they are dealt into
            optimizer steps, so none is ever whole. Or if its advantage needs several rewards of one episode.
    """
    if objective.advantage == "gdpo":
        raise ValueError(
            "advantage 'gdpo' compares every reward function apart, but an environment gives one reward: choose "
            "'return_to_go_timestep' or 'outcome'"
        )
    mode = objective.aggregation or LOSS_TYPES[objective.loss_type].aggregation
    if not LOSS_TYPES[objective.loss_type].per_action:
        problem, remedy = f"loss_type {objective.loss_type!r} has one ratio per completion", ""
    elif mode != "token-mean":
        problem = f"loss_type {objective.loss_type!r} with aggregation {mode!r} weighs actions by their completion"
        remedy = ", or aggregation 'token-mean'"
    else:
        return
    raise ValueError(
        f"{problem}, but small networks learn from single transitions: choose loss_type 'dapo', 'bnpo' or 'cispo'"
        f"{remedy}"
    )


def check_hyperparameters(
    objective: Objective, hyperparameters: Hyperparameters, space: HyperparameterConfig | None, *, of_transitions: bool
) -> None:
    """Refuse hyperparameters with which a member, or what evolution makes of it, could not learn.

    Args:
        objective: The population's.
        hyperparameters: The member's.
        space: What evolves; None = nothing.
        of_transitions: Whether members learn from single transitions.

    Raises:
        ValueError: See `Objective.check_member` and `check_action_objective`.
    """
    objective.check_member(hyperparameters, space)
    if of_transitions:
        for name in ("loss_type", "advantage"):
            for kind in (getattr(hyperparameters, name), *(space[name].names if space and name in space else ())):
                check_action_objective(objective.with_types(**{name: kind}))


def filter_groups(batch: Batch, objective: Objective) -> Batch:
    """Return the batch with the groups left out of the loss that are too hard or too easy by their mean reward."""
    low, high = objective.min_group_reward, objective.max_group_reward
    if low is None and high is None:
        return batch
    inside = difficulty_mask(batch.rewards, batch.group_ids, low, high)
    return replace(batch, action_mask=batch.action_mask & inside[:, None], chosen=batch.chosen)


def check_finite_rewards(batch: Batch) -> None:
    """Refuse rewards that are infinite: their group would compare as equal, and nothing would be learnt from it.

    Raises:
        ValueError: With the first row that has one.
    """
    for name, values in (("rewards", batch.rewards), ("rewards of single steps", batch.step_rewards)):
        infinite = None if values is None else values.isinf().reshape(len(values), -1).any(1)
        if infinite is not None and bool(infinite.any()):
            raise ValueError(
                f"{name} must be finite numbers that float32 holds, or NaN where none applies, but "
                f"{int(infinite.sum())} of {len(infinite)} samples have an infinite one, the first of them number "
                f"{int(infinite.nonzero()[0])} (from 0, group by group): bound what the reward function returns"
            )


def compute_advantages(
    batch: Batch, objective: Objective, coefficients: RowHyperparameters, carried: Tensor, kl_penalty: Tensor | None
) -> Tensor:
    """Return the advantage of every action.

    Args:
        batch: Whole groups of whole episodes.
        objective: The run's; the kind of advantage is each member's own.
        coefficients: Of the batch's rows.
        carried: `[p, 4]` running statistics by slot; those of rewards are brought up to date in place where
            `reward_norm` is "running".
        kl_penalty: `[n, t]` beta times KL, for KL in rewards; None = KL is not in rewards.

    Returns:
        `[n, t]` float32; 0 where `action_mask` is False.
    """
    rewards = batch.rewards
    if objective.reward_norm is not None:
        rewards = _normalised(batch, objective, carried)
    result = torch.zeros(batch.action_mask.shape, dtype=rewards.dtype, device=rewards.device)
    for kind, flag in coefficients.advantages.items():
        rows = flag.nonzero()[:, 0]
        own, gamma, bound = batch.select(rows), coefficients.gamma[rows], coefficients.advantage_clip[rows]
        if kind in STEP_ADVANTAGES:
            _warn_of_equal_steps(kind, own)
        result[rows] = advantages(
            kind,
            rewards=rewards[rows],
            step_rewards=own.step_rewards,
            components=own.reward_components,
            component_weights=torch.tensor(own.component_weights) if own.component_weights else None,
            group_ids=own.group_ids,
            member_ids=own.member_ids,
            mask=_compared(own) if kind in STEP_ADVANTAGES else own.action_mask,
            gamma=gamma,
            eps=objective.advantage_eps,
            kl_penalty=None if kl_penalty is None else kl_penalty[rows],
            reward_clip=objective.reward_clip,
            whiten_advantages=objective.whiten_advantages,
            advantage_clip=bound if bool(bound.isfinite().any()) else None,
        )
    return torch.where(batch.action_mask, result, 0.0)


def _normalised(batch: Batch, objective: Objective, carried: Tensor) -> Tensor:
    assert objective.reward_norm is not None
    running = None
    if objective.reward_norm == "running":
        before_changes(last=False)
        carried[:, 1:] = update_running_statistics(carried[:, 1:], batch.rewards.cpu(), batch.member_ids.cpu())
        running = carried[:, 1:].to(batch.rewards.device)
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


def _compared(batch: Batch) -> Tensor:
    """Return `[n, t]` which actions take part in statistics: an episode left out of the loss keeps its place there."""
    left_out = ~batch.action_mask.any(1, keepdim=True)
    return batch.action_mask | (batch.chosen & left_out)


def _warn_of_equal_steps(kind: str, batch: Batch) -> None:
    """Say so when the process variant is 0 everywhere although episodes differ, as where every step earns 1."""
    if kind != "process" or batch.step_rewards is None:
        return
    given = batch.step_rewards[_compared(batch) & ~batch.step_rewards.isnan()]
    group, count = consecutive_ids(batch.group_ids)
    differ = not bool(zero_variance_groups(batch.rewards, group, count).all())
    if differ and len(given) and bool(given.min() == given.max()):
        warn(
            f"every step earned {float(given[0]):g}, so advantage 'process', which compares single steps, is 0 "
            "everywhere and nothing is learnt: choose 'return_to_go_timestep' or 'outcome'",
            rank_zero_only=False,
        )
