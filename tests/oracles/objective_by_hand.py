"""A learning step by the papers' formulas: PEFT and AdamW, one completion at a time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.objective import Objective
from evogrpo.functional.loss_types import LOSS_TYPES, STEP_ADVANTAGES
from evogrpo.records import Batch
from tests.oracles.peft_members import PeftMember
from tests.oracles.slow_advantages import gdpo, of_actions, of_completions, returns_to_go
from tests.oracles.slow_losses import member_loss


@dataclass(frozen=True)
class Row:
    """One completion: prompt, tokens and which of them count."""

    prompt: tuple[int, ...]
    tokens: list[int]
    counted: list[bool]

    def pick(self, values: Tensor) -> Tensor:
        """Return the entries of the tokens that count."""
        return values[torch.tensor(self.counted)]


def rows_of(batch: Batch) -> list[Row]:
    """Split a batch of one member into rows."""
    prompts = [batch.inputs.prompts[number] for number in batch.inputs.prompt_ids.tolist()]
    present = batch.present
    counted = batch.action_mask
    return [
        Row(
            prompts[row],
            batch.actions[row][present[row]].tolist(),
            counted[row][present[row]].tolist(),
        )
        for row in range(len(batch))
    ]


def divergence(kind: str, now: Tensor, reference: Tensor) -> Tensor:
    """Estimate KL(policy || reference) at each action."""
    difference = now - reference
    return {
        "k1": difference,
        "k2": difference**2 / 2,
        "k3": torch.exp(-difference) - 1 + difference,
        "abs": difference.abs(),
    }[kind]


def clipped(values: Sequence[float], bound: float | None) -> list[float]:
    if bound is None:
        return list(values)
    return [min(max(value, -bound), bound) for value in values]


def advantages_of(
    batch: Batch,
    objective: Objective,
    h: Hyperparameters,
    penalties: Sequence[Sequence[float]] | None = None,
) -> list[list[float]]:
    """Return the advantage of each action, in the order that `Objective` documents, unwhitened."""
    kind = objective.advantage
    eps = objective.advantage_eps
    members = [0] * len(batch)
    groups = batch.group_ids.tolist()
    lengths = batch.action_mask.sum(1).tolist()
    if kind in STEP_ADVANTAGES:
        assert batch.step_rewards is not None
        episodes = [
            batch.step_rewards[row][batch.action_mask[row]].tolist() for row in range(len(batch))
        ]
        values = of_actions(kind, episodes, groups, h.gamma, eps)
    else:
        if kind == "gdpo":
            assert batch.reward_components is not None
            assert batch.component_weights is not None
            weights = batch.component_weights[0].tolist()  # the same for all rows
            scores = gdpo(batch.reward_components.tolist(), weights, groups, members, eps)
        else:
            scores = of_completions(kind, batch.rewards.tolist(), groups, members, eps)
        values = []
        for row, (score, length) in enumerate(
            zip(clipped(scores, objective.reward_clip), lengths, strict=True)
        ):
            steps = [0.0] * (length - 1) + [score] if length else []
            if penalties is not None and not batch.rewards[row].isnan():
                steps = clipped(
                    [step - cost for step, cost in zip(steps, penalties[row], strict=True)],
                    objective.reward_clip,
                )
            values.append(returns_to_go(steps, h.gamma))
    return [clipped(row, h.advantage_clip) for row in values]


class ByHand:
    """One member that learns alone from one batch.

    Args:
        member: Its policy as a separate PEFT model; trained in place.
        batch: Rows of this member.
        h: Its hyperparameters.
        objective: Its objective.
        reference: The reference policy; None = the base.
        eps: AdamW's epsilon.
    """

    def __init__(
        self,
        member: PeftMember,
        batch: Batch,
        h: Hyperparameters,
        objective: Objective,
        *,
        reference: PeftMember | None = None,
        eps: float = 1e-5,
        max_completion_length: int = 6,
    ) -> None:
        self.member = member
        self.rows = rows_of(batch)
        self.h = h
        self.objective = objective
        self.max_completion_length = max_completion_length
        self.optimizer = torch.optim.AdamW(
            member.parameters.values(), lr=h.lr, eps=eps, weight_decay=0.0
        )
        with torch.no_grad():
            self.old = [self.log_probs(row) for row in self.rows]
            self.reference: list[Tensor] = []  # not needed without a weight
            if h.beta and reference is None:
                with member.model.disable_adapter():
                    self.reference = [self.log_probs(row) for row in self.rows]
            elif h.beta:
                self.reference = [self.log_probs(row, reference) for row in self.rows]
        penalties = None
        if objective.kl_placement == "reward":
            penalties = [
                (h.beta * divergence(objective.kl_estimator, old, ref)).tolist()
                for old, ref in zip(self.old, self.reference, strict=True)
            ]
        self.advantages = advantages_of(batch, objective, h, penalties)

    def log_probs(self, row: Row, member: PeftMember | None = None) -> Tensor:
        """Return the selected counted tokens."""
        return row.pick(
            (member or self.member).log_probs(
                row.prompt, row.tokens, temperature=self.h.temperature
            )
        )

    def loss(self, chosen: Sequence[int], old: Sequence[Tensor] | None = None) -> Tensor:
        """Return the loss of an optimizer step on these rows, in float64."""
        objective = self.objective
        h = self.h
        mode = objective.aggregation or LOSS_TYPES[objective.loss_type].aggregation
        rows = [self.rows[number] for number in chosen]
        new = [self.log_probs(row).double() for row in rows]
        low, high = h.clip_bounds
        total = member_loss(
            objective.loss_type,
            mode,
            [list(values) for values in new],
            [(self.old if old is None else old)[number].tolist() for number in chosen],
            [self.advantages[number] for number in chosen],
            max_completion_length=self.max_completion_length,
            clip_low=low,
            clip_high=high,
            dual_clip=objective.dual_clip,
            delta=objective.delta,
            sapo_tau_positive=objective.sapo_tau_positive,
            sapo_tau_negative=objective.sapo_tau_negative,
            cispo_clip_low=objective.cispo_clip_low,
        )
        actions = sum(len(values) for values in new)
        for number, row, values in zip(chosen, rows, new, strict=True):
            # A step in which every action is clipped has a gradient of zeros, not none.
            extra = 0.0 * values
            if h.beta and objective.kl_placement == "loss":
                extra = h.beta * divergence(
                    objective.kl_estimator, values, self.reference[number].double()
                )
                if objective.kl_bias_correction:
                    difference = values - (self.old if old is None else old)[number].double()
                    per_completion = objective.loss_type in ("gspo", "luspo")
                    extra = extra * torch.exp(difference.mean() if per_completion else difference)
            if h.entropy_coef:
                entropies = self.member.entropies(row.prompt, row.tokens, temperature=h.temperature)
                bonus = h.entropy_coef * row.pick(entropies).double()
                if objective.entropy_reduction == "mean":
                    total = total - bonus.sum() / actions
                else:
                    extra = extra - bonus
            amount = {
                "token-mean": actions,
                "seq-mean-token-sum": len(rows),
                "seq-mean-token-mean": len(rows) * max(len(values), 1),
                "seq-mean-token-sum-norm": len(rows) * self.max_completion_length,
            }[mode]
            total = total + extra.sum() / amount
        return total

    def learn(self, plan: Sequence[Tensor]) -> list[float]:
        """Take one optimizer step for each entry of the plan.

        Return the losses and keep the gradients' `norms`.
        """
        losses = []
        self.norms = list[float]()
        for chosen in plan:
            self.optimizer.zero_grad()
            loss = self.loss(chosen.tolist())
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(
                self.member.parameters.values(), self.h.max_grad_norm
            )
            self.norms.append(float(norm))
            self.optimizer.step()
            losses.append(float(loss.detach()))
        assert all(map(math.isfinite, losses))
        return losses
