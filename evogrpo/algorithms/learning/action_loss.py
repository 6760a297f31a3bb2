"""Loss of one optimizer step: each row by its own member's loss type and coefficients."""

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
    """The members' own numbers and kinds, row by row; numbers are `[n, 1]`, flags `[n]`.

    Attributes:
        clip_low: Distance from 1 to the lower edge of the trust region.
        clip_high: Distance to its upper edge.
        beta: Weight of the KL to the reference, the adaptive factor included.
        entropy_coef: Weight of the entropy bonus.
        gamma: Discount per action.
        advantage_clip: Bound on advantages; infinite where there is none.
        loss_types: By name, the rows of members that minimise that loss.
        advantages: By name, the rows of members that use that estimator.
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
    learners: Mapping[int, Learner],
    objectives: Mapping[int, Objective],
    kl_factors: Tensor,
    member_ids: Tensor,
) -> RowHyperparameters:
    """Look up every row's coefficients.

    Args:
        learners: By slot.
        objectives: Each member's own, by slot.
        kl_factors: `[p]` factors on beta, by slot.
        member_ids: `[n]` slots, all among `learners`.
    """
    device = member_ids.device

    def column(values: Mapping[int, float]) -> Tensor:
        table = torch.zeros(len(kl_factors))
        table[list(values)] = torch.tensor(list(values.values()))
        return table.to(device).index_select(0, member_ids)[:, None]

    def flags(names: Mapping[int, str]) -> dict[str, Tensor]:
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
        loss_types=flags({slot: objective.loss_type for slot, objective in objectives.items()}),
        advantages=flags({slot: objective.advantage for slot, objective in objectives.items()}),
    )


MEASURES = ("kl", "entropy", "low", "high", "actions", "approx_kl", "outside")
"""What is added up over a row's actions while the loss is computed; the last two of transitions only, NaN otherwise."""


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """What the loss reads of `k` rows: `[k, t]`, clips `[k, 1]`."""

    old: Tensor
    mask: Tensor
    advantages: Tensor
    clip_low: Tensor
    clip_high: Tensor

    def select(self, numbers: Tensor) -> "_Rows":
        return _Rows(**{name: select_rows(values, numbers) for name, values in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class ActionLosses:
    """Losses of a batch's actions, for any of its rows at a time.

    Attributes:
        known: The rows (lessons), and what is known about them without gradient.
        objectives: The members' own objectives, one for each loss type.
        coefficients: Of the rows.
        advantages: `[n, t]`.
        kl_in_loss: Whether beta times KL is part of the loss.
        transitions: Whether rows are single actions; only then is it measured how far the policy has moved.
    """

    known: CachedLogProbs
    objectives: Mapping[str, Objective]
    coefficients: RowHyperparameters
    advantages: Tensor
    kl_in_loss: bool
    transitions: bool

    def rows_with_gradient(self) -> Tensor:
        """Return `[n]`: which rows can have a gradient. The others need no forward pass; denominators count them."""
        always = self.coefficients.entropy_coef > 0
        if self.kl_in_loss:
            always = always | (self.coefficients.beta > 0)
        return (((self.advantages != 0) | always) & self.known.lessons.outcomes.action_mask).any(1)

    def __call__(
        self, rows: Tensor, log_probs: Tensor, entropies: Tensor, kept: Tensor, divergences: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the losses `[k, t]` without the entropy bonus, and sums over each row's actions `[k, 7]` float64.

        The sums are of `MEASURES`.

        Args:
            rows: `[k]` numbers of rows.
            log_probs: `[k, t]` of the current policy.
            entropies: `[k, t]`, to be measured.
            kept: `[k, t]` which actions the policy loss is taken of.
            divergences: `[k, t]` from what the policies are held to as whole distributions, if they are.
        """
        batch, objective = self.known.lessons.outcomes, next(iter(self.objectives.values()))
        here = self._rows(rows)
        losses, low, high = self._policy(rows, log_probs, here)
        losses = torch.where(kept, losses, 0.0)
        if objective.importance_correction is not None and batch.sampler_log_probs is not None:
            losses = losses * importance_weights(
                objective.importance_correction,
                here.old,
                select_rows(batch.sampler_log_probs, rows),
                here.mask,
                objective.importance_cap,
            )
        kl = torch.zeros_like(losses)
        if self.kl_in_loss:
            # Where beta is 0 there is no reference pass, so there is no estimate either.
            estimate, beta = divergences, select_rows(self.coefficients.beta, rows)
            if estimate is None:
                held_to = here.old if objective.reference == "old" else select_rows(self.known.reference, rows)
                estimate = kl_estimate(objective.kl_estimator, log_probs, held_to)
            if objective.kl_bias_correction:
                estimate = self._bias_corrected(estimate, rows, log_probs, here)
            kl = torch.where(here.mask & (beta > 0), estimate, 0.0)
            losses = losses + beta * kl
        measured = (kl, entropies, low, high, here.mask, *self._moved(log_probs, here))
        sums = torch.empty(len(rows), len(MEASURES), dtype=torch.float64, device=losses.device)
        for number, each in enumerate(measured):
            sums[:, number] = each.detach().sum(1, dtype=torch.float64)  # a stack takes twice as long
        return losses, sums

    def _rows(self, rows: Tensor) -> "_Rows":
        """Gather what the loss reads of some rows."""
        return _Rows(
            old=select_rows(self.known.old, rows),
            mask=select_rows(self.known.lessons.outcomes.action_mask, rows),
            advantages=select_rows(self.advantages, rows),
            clip_low=select_rows(self.coefficients.clip_low, rows),
            clip_high=select_rows(self.coefficients.clip_high, rows),
        )

    def _moved(self, log_probs: Tensor, here: "_Rows") -> tuple[Tensor, Tensor]:
        """Return how far each action's ratio rho = exp(d) lies from 1, `[k, t]` each, as Stable-Baselines3 measures it.

        The estimate (rho - 1) - d of KL(old || new), and whether |rho - 1| exceeds the clip, whatever the advantage.

        Source: Schulman, http://joschu.net/blog/kl-approx.html (k3); `PPO.train` of Stable-Baselines3 2.9.
        """
        if not self.transitions:
            unknown = torch.full_like(log_probs, torch.nan)
            return unknown, unknown
        difference = log_probs.detach() - here.old
        excess = torch.expm1(difference)  # near 1 a ratio in float32 has lost the digits that its KL is made of
        outside = (excess < -here.clip_low) | (excess > here.clip_high)
        return excess - difference, outside

    def _bias_corrected(self, estimate: Tensor, rows: Tensor, log_probs: Tensor, here: "_Rows") -> Tensor:
        """Multiply the KL of each row by the ratio of its loss type."""
        old, mask = here.old, here.mask
        result = torch.zeros_like(estimate)
        for name, flag in self.coefficients.loss_types.items():
            own = flag[rows].nonzero()[:, 0]
            result = result.index_copy(
                0, own, bias_corrected_kl(estimate[own], name, log_probs[own], old[own], mask[own])
            )
        return result

    def _policy(self, rows: Tensor, log_probs: Tensor, here: "_Rows") -> tuple[Tensor, Tensor, Tensor]:
        """Return policy losses and where the lower and the upper clip bind, `[k, t]` each."""
        if len(self.objectives) == 1:
            return self._of_type(next(iter(self.objectives)), log_probs, here)
        losses = torch.zeros_like(log_probs)
        low = torch.zeros(log_probs.shape, dtype=torch.bool, device=log_probs.device)
        high = torch.zeros_like(low)
        for name, flag in self.coefficients.loss_types.items():
            own = flag[rows].nonzero()[:, 0]
            if len(own):
                part, low[own], high[own] = self._of_type(name, log_probs[own], here.select(own))
                losses = losses.index_copy(0, own, part)
        return losses, low, high

    def _of_type(self, name: str, log_probs: Tensor, here: "_Rows") -> tuple[Tensor, Tensor, Tensor]:
        objective = self.objectives[name]
        given = (name, log_probs, here.old, here.advantages, here.mask)
        floor = objective.cispo_clip_low
        losses = policy_loss(
            *given,
            clip_low=here.clip_low,
            clip_high=here.clip_high,
            dual_clip=objective.dual_clip,
            delta=objective.delta,
            sapo_tau_positive=objective.sapo_tau_positive,
            sapo_tau_negative=objective.sapo_tau_negative,
            cispo_clip_low=floor,
        )
        clipped = clipped_actions(*given, clip_low=here.clip_low, clip_high=here.clip_high, cispo_clip_low=floor)
        return losses, *clipped

    def bonus_weights(self, rows: Tensor, weights: Tensor, kept: Tensor) -> Tensor:
        """Return `[k, t]` what every action's entropy weighs in its member's bonus, coefficient included.

        Args:
            rows: `[k]`, all of an optimizer step.
            weights: `[k, t]` of the loss.
            kept: `[k, t]` which actions the policy loss is taken of.
        """
        if next(iter(self.objectives.values())).entropy_reduction == "mean":
            member_ids = select_rows(self.known.lessons.outcomes.member_ids, rows)
            weights = loss_weights("dapo", "token-mean", kept, member_ids, 1)
        return select_rows(self.coefficients.entropy_coef, rows) * weights

    def weights(self, rows: Tensor, max_completion_length: int) -> Tensor:
        """Return `[k, t]` what every action weighs in its member's loss, in an optimizer step of these rows."""
        outcomes = self.known.lessons.outcomes
        mask, member_ids = (select_rows(values, rows) for values in (outcomes.action_mask, outcomes.member_ids))
        if len(self.objectives) == 1:
            ((name, objective),) = self.objectives.items()
            return loss_weights(name, objective.aggregation, mask, member_ids, max_completion_length)
        result = torch.zeros(mask.shape, device=mask.device)
        for name, objective in self.objectives.items():
            own = self.coefficients.loss_types[name][rows]
            result[own] = loss_weights(name, objective.aggregation, mask[own], member_ids[own], max_completion_length)
        return result
