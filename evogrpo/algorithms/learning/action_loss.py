"""Advantages and losses of actions: each row by the types and hyperparameters of its own member."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from evogrpo.algorithms.learning.training_rows import TrainingRows
from evogrpo.config.objective import Objective
from evogrpo.functional.advantages import advantages
from evogrpo.functional.loss_types import STEP_ADVANTAGES
from evogrpo.functional.losses import (
    bias_corrected_kl,
    clipped_actions,
    importance_weights,
    kl_estimate,
    policy_loss,
)
from evogrpo.functional.rewards import (
    consecutive_ids,
    normalise_rewards,
    update_running_statistics,
    zero_variance_groups,
)
from evogrpo.members.bank import Update
from evogrpo.members.requests import Learner
from evogrpo.records import Batch, select_rows
from evogrpo.warnings import warn

Part = Tensor | slice
"""Indices `[j]` into the rows of an optimizer step, or all of them."""


@dataclass(frozen=True, kw_only=True)
class RowHyperparameters:
    """Hyperparameters of each row's member: numbers as columns `[n, 1]`, types as masks `[n]`.

    Attributes:
        clip_low: Distance from 1 to the lower clipping bound of the probability ratio.
        clip_high: Distance from 1 to its upper bound.
        beta: Weight of the KL to the reference, times the factor of adaptive KL.
        entropy_coef: Weight of the entropy bonus.
        gamma: Discount per action.
        advantage_clip: Bound on the size of advantages; infinite without one.
        loss_types: Mask of the rows whose members have a loss type, by loss type in use.
        advantages: Mask of the rows whose members have an advantage type, by type in use.
    """

    clip_low: Tensor
    clip_high: Tensor
    beta: Tensor
    entropy_coef: Tensor
    gamma: Tensor
    advantage_clip: Tensor
    loss_types: Mapping[str, Tensor]
    advantages: Mapping[str, Tensor]

    @classmethod
    def of(
        cls,
        learners: Mapping[int, Learner],
        objectives: Mapping[int, Objective],
        kl_factors: Tensor,
        member_ids: Tensor,
    ) -> "RowHyperparameters":
        """Look up the hyperparameters of each row's member.

        Args:
            learners: Learners by slot.
            objectives: Each member's objective, by slot.
            kl_factors: `[p]` factors on beta, by slot.
            member_ids: `[n]` slots, all of them in `learners`.
        """
        # 1. Fill a table `[names, slots]`. `beta` is a view of its row, so the KL factors change
        #    the table.
        by_type = ("loss_types", "advantages")
        names = [field.name for field in fields(cls) if field.name not in by_type]
        values = torch.zeros(len(names), len(kl_factors), dtype=torch.float64)
        for slot, learner in learners.items():
            numbers = [learner.hyperparameters.number(name) for name in names]
            values[:, slot] = torch.tensor(numbers, dtype=values.dtype)
        # The factor of a member without KL may have any value.
        beta = values[names.index("beta")]
        beta *= torch.where(beta > 0, kl_factors, 1.0)
        # 2. Look up the column of each row's member: `[names, n, 1]`.
        table = values.float().to(member_ids.device)
        columns = table.index_select(1, member_ids)[:, :, None]

        # 3. Mark the rows of each loss type and advantage type.
        def masks(types: Mapping[int, str]) -> dict[str, Tensor]:
            """Return a mask of rows for each type; `types` are those of the members, by slot."""
            found = {}
            for name in sorted(set(types.values())):
                slots = [slot for slot, kind in types.items() if kind == name]
                of_type = torch.tensor(slots, device=member_ids.device)
                found[name] = torch.isin(member_ids, of_type)
            return found

        loss_types = {slot: objective.loss_type for slot, objective in objectives.items()}
        advantage_types = {slot: objective.advantage for slot, objective in objectives.items()}
        return cls(
            **dict(zip(names, columns, strict=True)),
            loss_types=masks(loss_types),
            advantages=masks(advantage_types),
        )


ACTION_SUMS = ("kl", "entropy", "low", "high", "actions")
"""Sums over a row's actions that a report needs."""


@dataclass(frozen=True, kw_only=True)
class ActionLosses:
    """Losses of the actions of any of a batch's rows.

    Attributes:
        training_rows: The training rows.
        objective: The population's objective.
        objectives: One objective for each loss type in use.
        per_row: Hyperparameters of the rows.
        advantages: `[n, t]`.
        kl_in_loss: True adds beta times KL to the loss.
    """

    training_rows: TrainingRows
    objective: Objective
    objectives: Mapping[str, Objective]
    per_row: RowHyperparameters
    advantages: Tensor
    kl_in_loss: bool

    def __call__(
        self,
        rows: Tensor,
        log_probs: Tensor,
        old: Tensor,
        in_policy_loss: Tensor,
        divergences: Tensor | None = None,
    ) -> Tensor:
        """Return losses `[k, t]` without the entropy bonus.

        Args:
            rows: `[k]` row indices.
            log_probs: `[k, t]` of the current policy.
            old: `[k, t]` of the behaviour policy.
            in_policy_loss: `[k, t]` True for actions that have a policy loss.
            divergences: `[k, t]` exact KL to the reference distributions; None = estimate KL from
                log-probabilities.
        """
        batch = self.training_rows.samples
        shared = self.objective
        mask = select_rows(batch.action_mask, rows)
        advantages = select_rows(self.advantages, rows)
        clip_low = select_rows(self.per_row.clip_low, rows)
        clip_high = select_rows(self.per_row.clip_high, rows)

        # 1. Compute the policy loss, each row by its loss type.
        def typed_loss(name: str, part: Part) -> Tensor:
            """Return the losses of rows whose members have one loss type."""
            objective = self.objectives[name]
            # Clipping differs from row to row, the other coefficients between loss types only.
            return policy_loss(
                name,
                log_probs[part],
                old[part],
                advantages[part],
                mask[part],
                clip_low=clip_low[part],
                clip_high=clip_high[part],
                dual_clip=objective.dual_clip,
                delta=objective.delta,
                sapo_tau_positive=objective.sapo_tau_positive,
                sapo_tau_negative=objective.sapo_tau_negative,
                cispo_clip_low=objective.cispo_clip_low,
            )

        losses = torch.where(in_policy_loss, self.by_loss_type(rows, typed_loss), 0.0)
        # 2. Correct for samplers whose log-probabilities differ from the trainer's. The KL below
        #    gets no importance weight.
        if shared.importance_correction is not None and batch.sampler_log_probs is not None:
            sampler = select_rows(batch.sampler_log_probs, rows)
            losses = losses * importance_weights(
                shared.importance_correction, old, sampler, mask, shared.importance_cap
            )
        # 3. Add the KL to the reference.
        if self.kl_in_loss:
            beta = select_rows(self.per_row.beta, rows)
            losses = losses + beta * self._kl(rows, log_probs, old, divergences)
        return losses

    def _kl(
        self, rows: Tensor, log_probs: Tensor, old: Tensor, divergences: Tensor | None
    ) -> Tensor:
        """Return the KL to the reference `[k, t]`.

        0 where beta is 0, as there is no reference log-probability.
        """
        shared = self.objective
        mask = select_rows(self.training_rows.samples.action_mask, rows)
        # 1. Take the exact divergences, or estimate them from the sampled actions.
        kl = divergences
        if kl is None:
            if shared.reference == "old":
                reference = old
            else:
                reference = select_rows(self.training_rows.reference, rows)
            kl = kl_estimate(shared.kl_estimator, log_probs, reference)
        # 2. Correct them for the difference between the old policy and the current one.
        if shared.kl_bias_correction:
            estimates = kl

            def corrected(name: str, part: Part) -> Tensor:
                """Return the KL estimates of rows whose members have one loss type."""
                return bias_corrected_kl(
                    estimates[part], name, log_probs[part], old[part], mask[part]
                )

            kl = self.by_loss_type(rows, corrected)
        weighted = select_rows(self.per_row.beta, rows) > 0
        return torch.where(mask & weighted, kl, 0.0)

    @torch.no_grad()
    def measure(self, rows: Tensor, update: Update) -> Tensor:
        """Return sums over each row's actions, `[k, len(ACTION_SUMS)]`.

        Args:
            rows: `[k]` row indices.
            update: Log-probabilities, entropies and divergences of these rows in an optimizer step.
        """
        # 1. Select the values of these rows.
        log_probs = update.log_probs
        old = select_rows(self.training_rows.old, rows)
        sums = torch.zeros(
            len(rows), len(ACTION_SUMS), dtype=torch.float64, device=log_probs.device
        )
        if not len(rows):
            return sums
        mask = select_rows(self.training_rows.samples.action_mask, rows)
        advantages = select_rows(self.advantages, rows)
        clip_low = select_rows(self.per_row.clip_low, rows)
        clip_high = select_rows(self.per_row.clip_high, rows)

        # 2. Find the clipped actions, each row by its loss type.
        def clipped(name: str, part: Part) -> Tensor:
            """Return masks of clipped actions, of rows whose members have one loss type."""
            low_and_high = clipped_actions(
                name,
                log_probs[part],
                old[part],
                advantages[part],
                mask[part],
                clip_low=clip_low[part],
                clip_high=clip_high[part],
                cispo_clip_low=self.objectives[name].cispo_clip_low,
            )
            # Both masks in one tensor `[k, t, 2]`, as `by_loss_type` joins along the rows.
            return torch.stack(low_and_high, 2)

        low, high = self.by_loss_type(rows, clipped).unbind(2)
        # 3. Sum over the actions, in float64, as the sums of all optimizer steps are added up.
        measured = {"entropy": update.entropies, "low": low, "high": high, "actions": mask}
        if self.kl_in_loss:
            measured["kl"] = self._kl(rows, log_probs, old, update.divergences)
        for name, values in measured.items():
            sums[:, ACTION_SUMS.index(name)] = values.sum(1, dtype=torch.float64)
        return sums

    def by_loss_type(self, rows: Tensor, compute: Callable[[str, Part], Tensor]) -> Tensor:
        """Return values `[k, ...]` of rows, computed for the rows of each loss type."""
        if len(self.objectives) == 1:
            return compute(next(iter(self.objectives)), slice(None))
        parts = []
        values = []
        for name, has_type in self.per_row.loss_types.items():
            part = has_type[rows].nonzero()[:, 0]
            parts.append(part)
            if len(part):
                values.append(compute(name, part))
        # The argsort of a permutation is its inverse: it restores the order of `rows` from that of
        # the parts.
        order = torch.cat(parts).argsort()
        return torch.cat(values).index_select(0, order)


def compute_advantages(
    batch: Batch,
    objective: Objective,
    per_row: RowHyperparameters,
    running_stats: Tensor,
    kl_penalty: Tensor | None,
) -> Tensor:
    """Return the advantage of every action.

    Args:
        batch: Whole groups of whole episodes.
        objective: The run's objective; each member has its own advantage type.
        per_row: Hyperparameters of the batch's rows.
        running_stats: Running statistics by slot; updated in place if `reward_norm` is
            "running".
        kl_penalty: `[n, t]` beta times KL, subtracted from rewards; None = KL is not in the
            rewards.

    Returns:
        `[n, t]` float32; 0 where `action_mask` is False.
    """
    # 1. Normalise the rewards.
    rewards = batch.rewards
    if objective.reward_norm is not None:
        running = None
        if objective.reward_norm == "running":
            statistics = running_stats[:, 1:4]  # a view: count, mean and sum of squares
            statistics[:] = update_running_statistics(
                statistics, rewards.cpu(), batch.member_ids.cpu()
            )
            running = statistics.to(rewards.device)
        rewards = normalise_rewards(
            rewards,
            objective.reward_norm,
            group_ids=batch.group_ids,
            member_ids=batch.member_ids,
            running=running,
            shift=objective.reward_shift,
            scale=objective.reward_scale,
            eps=objective.advantage_eps,
        )
    # 2. Compute the advantages of each type for the rows of its members.
    result = torch.zeros(batch.action_mask.shape, dtype=rewards.dtype, device=rewards.device)
    for kind, has_type in per_row.advantages.items():
        rows = has_type.nonzero()[:, 0]
        part = batch.select(rows)
        mask = part.action_mask
        if kind in STEP_ADVANTAGES:
            _warn_equal_steps(kind, part)
            mask = _in_statistics(part)
        # Without any bound, `advantages` need not clip.
        bound = per_row.advantage_clip[rows]
        result[rows] = advantages(
            kind,
            rewards=rewards[rows],
            step_rewards=part.step_rewards,
            components=part.reward_components,
            component_weights=part.component_weights,
            group_ids=part.group_ids,
            member_ids=part.member_ids,
            mask=mask,
            gamma=per_row.gamma[rows],
            eps=objective.advantage_eps,
            kl_penalty=None if kl_penalty is None else kl_penalty[rows],
            reward_clip=objective.reward_clip,
            whiten_advantages=objective.whiten_advantages,
            in_loss=part.action_mask,
            advantage_clip=bound if bool(bound.isfinite().any()) else None,
        )
    return torch.where(batch.action_mask, result, 0.0)


def _in_statistics(batch: Batch) -> Tensor:
    """Return a mask `[n, t]` of actions that enter group statistics, including masked episodes.

    Leaving an episode out of the loss (a truncated completion, say) must not change the mean that
    others compare with.
    """
    left_out = ~batch.action_mask.any(1, keepdim=True)
    return batch.action_mask | (batch.chosen & left_out)


def _warn_equal_steps(kind: str, batch: Batch) -> None:
    """Warn if advantage 'process' is 0 everywhere because every step earned the same."""
    if kind != "process" or batch.step_rewards is None:
        return
    rewarded = _in_statistics(batch) & ~batch.step_rewards.isnan()
    step_rewards = batch.step_rewards[rewarded]
    group, count = consecutive_ids(batch.group_ids)
    differ = not bool(zero_variance_groups(batch.rewards, group, count).all())
    # Only groups whose rewards differ could teach anything.
    if differ and len(step_rewards) and bool(step_rewards.min() == step_rewards.max()):
        warn(
            f"Every step earned {float(step_rewards[0]):g}, so advantage='process' is 0 everywhere"
            " and nothing is learned. Choose 'return_to_go_timestep' or 'outcome'."
        )
