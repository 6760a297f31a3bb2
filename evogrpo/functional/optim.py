"""One AdamW step, gradient clipping and learning-rate schedules as in-place functions of plain tensors."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def clip_by_norm_(gradient: Tensor, max_norm: float) -> float:
    """Scale a flat gradient in place so that its 2-norm is at most `max_norm`, as `clip_grad_norm_` does.

    Args:
        gradient: `[k]`, changed in place.
        max_norm: Above 0.

    Returns:
        The norm before clipping.
    """
    norm = float(torch.linalg.vector_norm(gradient))
    gradient.mul_(min(1.0, max_norm / (norm + 1e-6)))
    return norm


def adamw_step_(
    weights: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Take one AdamW step in place, equal to `torch.optim.AdamW`.

    Args:
        weights: `[k]` parameters, changed in place.
        gradient: `[k]`; used as scratch space afterwards.
        exp_avg: `[k]` first moment, changed in place.
        exp_avg_sq: `[k]` second moment, changed in place.
        step: Which step this is, from 1.
        lr: Step size.
        betas: Decay rates of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled decay, per unit of lr.

    Source: Decoupled weight decay regularization (arXiv:1711.05101), algorithm 2.
    """
    weights.mul_(1.0 - lr * weight_decay)
    exp_avg.lerp_(gradient, 1.0 - betas[0])
    exp_avg_sq.mul_(betas[1]).addcmul_(gradient, gradient, value=1.0 - betas[1])
    root = torch.sqrt(exp_avg_sq, out=gradient)
    root.div_(math.sqrt(1.0 - betas[1] ** step)).add_(eps)
    # A step longer than any float of this type would be refused; this way it ruins the weights, which is noticed.
    length = min(lr / (1.0 - betas[0] ** step), torch.finfo(weights.dtype).max)
    weights.addcdiv_(exp_avg, root, value=-length)


def adamw_steps_(
    weights: Tensor,
    gradients: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    steps: Sequence[int],
    lrs: Sequence[float],
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Take one AdamW step for every row in place: `adamw_step_` for `[p, k]` weights, gradients and moments at once.

    `steps` and `lrs` hold each row's own step number, from 1, and step size; the other settings are shared.
    """

    def column(values: Iterable[float]) -> Tensor:
        # Clamped, as in adamw_step_: a step too long for the type ruins the weights, which is noticed.
        limit = torch.finfo(weights.dtype).max
        clamped = [max(-limit, min(limit, value)) for value in values]
        return torch.tensor(clamped, dtype=weights.dtype, device=weights.device)[:, None]

    if weight_decay:
        weights.mul_(column(1.0 - lr * weight_decay for lr in lrs))
    exp_avg.lerp_(gradients, 1.0 - betas[0])
    exp_avg_sq.mul_(betas[1]).addcmul_(gradients, gradients, value=1.0 - betas[1])
    root = torch.sqrt(exp_avg_sq, out=gradients)
    root.div_(column(math.sqrt(1.0 - betas[1] ** step) for step in steps)).add_(eps)
    torch.div(exp_avg, root, out=root)
    weights.addcmul_(root, column(-lr / (1.0 - betas[0] ** step) for lr, step in zip(lrs, steps, strict=True)))


def schedule_factor(
    step: int, *, kind: str, warmup_steps: int, total_steps: int | None, cycles: float = 0.5, floor: float = 0.0
) -> float:
    """Return the fraction of the learning rate that optimizer step number `step` uses.

    Args:
        step: Optimizer steps taken so far by this member's lineage, from 0.
        kind: "constant", "linear" or "cosine".
        warmup_steps: Steps over which the factor rises from 0 to 1; the first step uses 0.
        total_steps: End of the decay; needed by "linear" and "cosine".
        cycles: Waves of the cosine until then; 0.5 ends in the first trough.
        floor: What "linear" comes down to, and the lowest of "cosine"; in [0, 1).

    Returns:
        A factor in [0, 1].

    Source: transformers, `get_scheduler`, of which these are linear, cosine, cosine_with_min_lr and polynomial of power
    1.
    """
    if step < warmup_steps:
        return step / warmup_steps
    if kind == "constant" or total_steps is None:
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    factor = 1.0 - progress if kind == "linear" else 0.5 * (1.0 + math.cos(2.0 * math.pi * cycles * progress))
    return floor + (1.0 - floor) * factor
