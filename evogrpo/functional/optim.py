"""AdamW steps, in place on plain tensors."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


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
        step: Number of this step, from 1.
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
    # torch refuses a factor that the dtype cannot hold. The largest one makes the weights infinite,
    # which is detected.
    step_size = min(lr / (1.0 - betas[0] ** step), torch.finfo(weights.dtype).max)
    weights.addcdiv_(exp_avg, root, value=-step_size)


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
    """Take one AdamW step in place for every row of `[p, k]` weights, gradients and moments.

    See `adamw_step_`.

    `steps` and `lrs` are the step number (from 1) and learning rate of each row; the other settings
    are shared.
    """

    def column(values: Iterable[float]) -> Tensor:
        # Clamped to the dtype's range; see adamw_step_.
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
    weights.addcmul_(
        root, column(-lr / (1.0 - betas[0] ** step) for lr, step in zip(lrs, steps, strict=True))
    )
