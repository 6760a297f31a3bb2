"""Every loss type one action at a time from its formula; gradients flow through scalar tensors."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def _clip(value: Tensor, low: float, high: float) -> Tensor:
    if value < low:
        return torch.full_like(value, low)
    if value > high:
        return torch.full_like(value, high)
    return value


def _smaller(one: Tensor, other: Tensor) -> Tensor:
    return one if one <= other else other


def _surrogate(
    ratio: Tensor,
    advantage: float,
    low: float,
    high: float,
    dual: float | None,
    delta: float | None,
):
    free = ratio if delta is None else _clip(ratio, -math.inf, delta)
    loss = -_smaller(free * advantage, _clip(ratio, 1 - low, 1 + high) * advantage)
    if dual is not None and advantage < 0:
        loss = _smaller(loss, torch.full_like(loss, -dual * advantage))
    return loss


def completion_losses(
    loss_type: str,
    new: Sequence[Tensor],
    old: Sequence[float],
    advantages: Sequence[float],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    delta: float | None = None,
    sapo_tau_positive: float = 1.0,
    sapo_tau_negative: float = 1.05,
    cispo_clip_low: bool = False,
) -> list[Tensor]:
    """Return the loss of each action of one completion."""
    differences = [log_prob - old_log_prob for log_prob, old_log_prob in zip(new, old, strict=True)]
    actions = len(differences)
    if loss_type in ("grpo", "dapo", "bnpo", "dr_grpo"):
        ratios = [torch.exp(difference) for difference in differences]
    elif loss_type in ("gspo", "luspo"):
        ratios = [torch.exp(sum(differences) / actions)] * actions
    if loss_type in ("grpo", "dapo", "bnpo", "dr_grpo", "gspo", "luspo"):
        pairs = zip(ratios, advantages, strict=True)
        return [_surrogate(ratio, a, clip_low, clip_high, dual_clip, delta) for ratio, a in pairs]
    if loss_type == "cispo":
        factors = [min(math.exp(difference.item()), 1 + clip_high) for difference in differences]
        if cispo_clip_low:
            factors = [max(factor, 1 - clip_low) for factor in factors]
        return [
            -factor * a * log_prob
            for factor, a, log_prob in zip(factors, advantages, new, strict=True)
        ]
    if loss_type == "sapo":
        losses = []
        for difference, a in zip(differences, advantages, strict=True):
            tau = sapo_tau_positive if a > 0 else sapo_tau_negative
            gate = 1 / (1 + torch.exp(-tau * (torch.exp(difference) - 1)))
            losses.append(-a * gate * 4 / tau)
        return losses
    assert loss_type == "gmpo"
    bounded = []
    for difference, a in zip(differences, advantages, strict=True):
        if a > 0:
            bounded.append(_clip(difference, -math.inf, clip_high))
        elif a < 0:
            bounded.append(_clip(difference, -clip_low, math.inf))
        else:
            bounded.append(0 * difference)
    # The geometric mean of the ratios.
    product = math.prod(
        (torch.exp(value) for value in bounded), start=torch.ones((), dtype=torch.float64)
    )
    return [-a * product ** (1 / actions) for a in advantages]


def member_loss(
    loss_type: str,
    aggregation: str,
    new: Sequence[Sequence[Tensor]],
    old: Sequence[Sequence[float]],
    advantages: Sequence[Sequence[float]],
    *,
    max_completion_length: int | None = None,
    **options: object,
) -> Tensor:
    """Return one member's reduced loss; completions have no padding and may be empty."""
    rows = [
        completion_losses(loss_type, *row, **options)
        for row in zip(new, old, advantages, strict=True)
    ]
    zero = torch.zeros((), dtype=torch.float64)
    sums = [sum(row, zero) for row in rows]
    if aggregation == "token-mean":
        return sum(sums, zero) / max(sum(len(row) for row in rows), 1)
    if aggregation == "seq-mean-token-sum":
        return sum(sums, zero) / len(rows)
    if aggregation == "seq-mean-token-mean":
        return sum(
            (total / max(len(row), 1) for total, row in zip(sums, rows, strict=True)), zero
        ) / len(rows)
    assert aggregation == "seq-mean-token-sum-norm"
    return sum(sums, zero) / (len(rows) * max_completion_length)
