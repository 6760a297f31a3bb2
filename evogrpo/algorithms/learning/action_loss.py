"""Loss of one optimizer step: each row by the loss type and hyperparameters of its own member."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from evogrpo.algorithms.learning.training_rows import CachedLogProbs, Learner
from evogrpo.config.objective import Objective
from evogrpo.data import select_rows
from evogrpo.functional.corrections import importance_weights
from evogrpo.functional.kl import kl_estimate
from evogrpo.functional.losses import bias_corrected_kl, clipped_actions, loss_weights, policy_loss


@dataclass(frozen=True, kw_only=True)
class RowHyperparameters:
    """Hyperparameters of each row's member, as columns `[n, 1]`; masks of names are `[n]`.

    Attributes:
        clip_low: Distance from 1 to the lower clipping bound of the probability ratio.
        clip_high: Distance from 1 to its upper bound.
        beta: Weight of the KL to the reference, times the factor of adaptive KL.
        entropy_coef: Weight of the entropy bonus.
        gamma: Discount per action.
        advantage_clip: Bound on the size of advantages; infinite without one.
        loss_types: For each loss type in use, the rows whose members minimise it.
        advantages: For each advantage type in use, the rows whose members use it.
    """

    clip_low: Tensor
    clip_high: Tensor
    beta: Tensor
    entropy_coef: Tensor
    gamma: Tensor
    advantage_clip: Tensor
    loss_types: Mapping[str, Tensor]
    advantages: Mapping[str, Tensor]


def row_hyperparameters(
    learners: Mapping[int, Learner], objectives: Mapping[int, Objective], kl_factors: Tensor, member_ids: Tensor
) -> RowHyperparameters:
    """Look up the hyperparameters of each row's member.

    Args:
        learners: By slot.
        objectives: Each member's objective, by slot.
        kl_factors: `[p]` factors on beta, by slot.
        member_ids: `[n]` slots, all of them in `learners`.
    """
    device = member_ids.device

    def column(values: Mapping[int, float]) -> Tensor:
        table = torch.zeros(len(kl_factors))
        table[list(values)] = torch.tensor(list(values.values()))
        return table.to(device).index_select(0, member_ids)[:, None]

    def masks(names: Mapping[int, str]) -> dict[str, Tensor]:
        return {
            name: column({slot: float(own == name) for slot, own in names.items()})[:, 0] > 0
            for name in sorted(set(names.values()))
        }

    own = {slot: learner.hyperparameters for slot, learner in learners.items()}
    return RowHyperparameters(
        clip_low=column({slot: h.clip_bounds[0] for slot, h in own.items()}),
        clip_high=column({slot: h.clip_bounds[1] for slot, h in own.items()}),
        beta=column({slot: h.beta * float(kl_factors[slot]) if h.beta else 0.0 for slot, h in own.items()}),
        entropy_coef=column({slot: h.entropy_coef for slot, h in own.items()}),
        gamma=column({slot: h.gamma for slot, h in own.items()}),
        advantage_clip=column({slot: h.number("advantage_clip") for slot, h in own.items()}),
        loss_types=masks({slot: objective.loss_type for slot, objective in objectives.items()}),
        advantages=masks({slot: objective.advantage for slot, objective in objectives.items()}),
    )


MEASURES = ("kl", "entropy", "low", "high", "actions", "approx_kl", "outside")
"""Sums over a row's actions that the loss measures. The last two are NaN for language models."""


@dataclass(frozen=True, kw_only=True)
class _LossInputs:
    """Inputs of the policy loss for `k` rows: `[k, t]`, clipping bounds `[k, 1]`."""

    old: Tensor
    mask: Tensor
    advantages: Tensor
    clip_low: Tensor
    clip_high: Tensor


@dataclass(frozen=True, kw_only=True)
class ActionLosses:
    """Losses of the actions of any of a batch's rows.

    Attributes:
        cached: The training rows and their cached log-probabilities.
        objectives: One objective for each loss type in use.
        per_row: Hyperparameters of the rows.
        advantages: `[n, t]`.
        kl_in_loss: True adds beta times KL to the loss.
        transitions: True if rows are single actions; only then is the distance to the old policy measured.
    """

    cached: CachedLogProbs
    objectives: Mapping[str, Objective]
    per_row: RowHyperparameters
    advantages: Tensor
    kl_in_loss: bool
    transitions: bool

    def rows_with_gradient(self) -> Tensor:
        """Return `[n]` True for rows that can have a gradient. The others need no forward pass."""
        always = self.per_row.entropy_coef > 0
        if self.kl_in_loss:
            always = always | (self.per_row.beta > 0)
        return (((self.advantages != 0) | always) & self.cached.training_rows.outcomes.action_mask).any(1)

    def __call__(
        self, rows: Tensor, log_probs: Tensor, entropies: Tensor, kept: Tensor, divergences: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return losses `[k, t]` without the entropy bonus, and sums over each row's actions `[k, 7]` (`MEASURES`).

        Args:
            rows: `[k]` row indices.
            log_probs: `[k, t]` of the current policy.
            entropies: `[k, t]`, only measured here.
            kept: `[k, t]` actions that the policy loss is taken of.
            divergences: `[k, t]` exact KL to the reference distributions; None = estimate KL from log-probabilities.
        """
        batch, objective = self.cached.training_rows.outcomes, next(iter(self.objectives.values()))
        inputs = _LossInputs(
            old=select_rows(self.cached.old, rows),
            mask=select_rows(batch.action_mask, rows),
            advantages=select_rows(self.advantages, rows),
            clip_low=select_rows(self.per_row.clip_low, rows),
            clip_high=select_rows(self.per_row.clip_high, rows),
        )
        # 1. Policy loss, each row by its loss type.
        losses, low, high = self._policy_losses(rows, log_probs, inputs)
        losses = torch.where(kept, losses, 0.0)
        # 2. Importance correction for samplers whose log-probabilities differ from the trainer's.
        if objective.importance_correction is not None and batch.sampler_log_probs is not None:
            losses = losses * importance_weights(
                objective.importance_correction,
                inputs.old,
                select_rows(batch.sampler_log_probs, rows),
                inputs.mask,
                objective.importance_cap,
            )
        # 3. KL to the reference. Where beta is 0 the reference log-probabilities were not computed.
        kl = torch.zeros_like(losses)
        if self.kl_in_loss:
            estimate, beta = divergences, select_rows(self.per_row.beta, rows)
            if estimate is None:
                reference = inputs.old if objective.reference == "old" else select_rows(self.cached.reference, rows)
                estimate = kl_estimate(objective.kl_estimator, log_probs, reference)
            if objective.kl_bias_correction:
                estimate = self._bias_corrected(estimate, rows, log_probs, inputs)
            kl = torch.where(inputs.mask & (beta > 0), estimate, 0.0)
            losses = losses + beta * kl
        # 4. Sums for the report.
        measured = (kl, entropies, low, high, inputs.mask, *self._distance(log_probs, inputs))
        sums = torch.empty(len(rows), len(MEASURES), dtype=torch.float64, device=losses.device)
        for number, each in enumerate(measured):
            sums[:, number] = each.detach().sum(1, dtype=torch.float64)  # torch.stack takes twice as long
        return losses, sums

    def _distance(self, log_probs: Tensor, inputs: _LossInputs) -> tuple[Tensor, Tensor]:
        """Return the k3 estimate (rho - 1) - log(rho) of KL(old || new), and True where rho is outside the clip range.

        Source: Schulman, http://joschu.net/blog/kl-approx.html (k3); `PPO.train` of Stable-Baselines3 2.9.
        """
        if not self.transitions:
            unknown = torch.full_like(log_probs, torch.nan)
            return unknown, unknown
        log_ratio = log_probs.detach() - inputs.old
        excess = torch.expm1(log_ratio)  # exp(x) - 1 would cancel in float32 near rho = 1
        return excess - log_ratio, (excess < -inputs.clip_low) | (excess > inputs.clip_high)

    def _bias_corrected(self, estimate: Tensor, rows: Tensor, log_probs: Tensor, inputs: _LossInputs) -> Tensor:
        """Multiply each row's KL by the ratio of its loss type."""
        old, mask = inputs.old, inputs.mask
        result = torch.zeros_like(estimate)
        for name, flag in self.per_row.loss_types.items():
            own = flag[rows].nonzero()[:, 0]
            corrected = bias_corrected_kl(estimate[own], name, log_probs[own], old[own], mask[own])
            result = result.index_copy(0, own, corrected)
        return result

    def _policy_losses(self, rows: Tensor, log_probs: Tensor, inputs: _LossInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Return policy losses, and True where the lower and where the upper bound clips, `[k, t]` each."""
        if len(self.objectives) == 1:
            return self._typed_losses(next(iter(self.objectives)), log_probs, inputs)
        losses = torch.zeros_like(log_probs)
        low = torch.zeros(log_probs.shape, dtype=torch.bool, device=log_probs.device)
        high = torch.zeros_like(low)
        for name, flag in self.per_row.loss_types.items():
            own = flag[rows].nonzero()[:, 0]
            if len(own):
                part = _LossInputs(**{field: select_rows(values, own) for field, values in vars(inputs).items()})
                typed, low[own], high[own] = self._typed_losses(name, log_probs[own], part)
                losses = losses.index_copy(0, own, typed)
        return losses, low, high

    def _typed_losses(self, name: str, log_probs: Tensor, inputs: _LossInputs) -> tuple[Tensor, Tensor, Tensor]:
        objective = self.objectives[name]
        arguments = (name, log_probs, inputs.old, inputs.advantages, inputs.mask)
        clip_low, clip_high, floor = inputs.clip_low, inputs.clip_high, objective.cispo_clip_low
        losses = policy_loss(
            *arguments,
            clip_low=clip_low,
            clip_high=clip_high,
            dual_clip=objective.dual_clip,
            delta=objective.delta,
            sapo_tau_positive=objective.sapo_tau_positive,
            sapo_tau_negative=objective.sapo_tau_negative,
            cispo_clip_low=floor,
        )
        clipped = clipped_actions(*arguments, clip_low=clip_low, clip_high=clip_high, cispo_clip_low=floor)
        return losses, *clipped

    def weights(self, rows: Tensor, max_completion_length: int) -> Tensor:
        """Return `[k, t]` weights of the actions in their members' losses, for an optimizer step on these rows."""
        outcomes = self.cached.training_rows.outcomes
        mask, member_ids = (select_rows(values, rows) for values in (outcomes.action_mask, outcomes.member_ids))
        if len(self.objectives) == 1:
            ((name, objective),) = self.objectives.items()
            return loss_weights(name, objective.aggregation, mask, member_ids, max_completion_length)
        result = torch.zeros(mask.shape, device=mask.device)
        for name, objective in self.objectives.items():
            own = self.per_row.loss_types[name][rows]
            result[own] = loss_weights(name, objective.aggregation, mask[own], member_ids[own], max_completion_length)
        return result

    def entropy_weights(self, rows: Tensor, weights: Tensor, kept: Tensor) -> Tensor:
        """Return `[k, t]` weights of the actions' entropies in their members' bonuses, `entropy_coef` included.

        Args:
            rows: `[k]` row indices, all of an optimizer step.
            weights: `[k, t]` of the loss.
            kept: `[k, t]` actions that the policy loss is taken of.
        """
        if next(iter(self.objectives.values())).entropy_reduction == "mean":
            member_ids = select_rows(self.cached.training_rows.outcomes.member_ids, rows)
            weights = loss_weights("dapo", "token-mean", kept, member_ids, 1)
        return select_rows(self.per_row.entropy_coef, rows) * weights
