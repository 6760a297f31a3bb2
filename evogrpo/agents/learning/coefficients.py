"""What differs from member to member in one batch, row by row: coefficients, and kinds of loss and advantage."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from evogrpo.agents.learning.learner import Learner
from evogrpo.config.objective import Objective


@dataclass(frozen=True, kw_only=True)
class Coefficients:
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


def row_coefficients(
    learners: Mapping[int, Learner],
    objectives: Mapping[int, Objective],
    kl_factors: Tensor,
    member_ids: Tensor,
) -> Coefficients:
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
    return Coefficients(
        clip_low=column({slot: h.clip_bounds[0] for slot, h in own.items()}),
        clip_high=column({slot: h.clip_bounds[1] for slot, h in own.items()}),
        beta=column({slot: h.beta * float(kl_factors[slot]) if h.beta else 0.0 for slot, h in own.items()}),
        entropy_coef=column({slot: h.entropy_coef for slot, h in own.items()}),
        gamma=column({slot: h.gamma for slot, h in own.items()}),
        advantage_clip=column({slot: h.number("advantage_clip") for slot, h in own.items()}),
        loss_types=flags({slot: objective.loss_type for slot, objective in objectives.items()}),
        advantages=flags({slot: objective.advantage for slot, objective in objectives.items()}),
    )
