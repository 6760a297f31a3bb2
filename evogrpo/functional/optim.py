"""Gradient clipping and AdamW, in place on plain tensors."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def clipped_adamw_steps_(
    weights: Tensor,
    gradients: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    steps: Sequence[int],
    lrs: Sequence[float | None],
    max_norms: Sequence[float],
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    fused: bool = False,
) -> list[float]:
    """Clip the gradient of every row and take its AdamW step, as `torch.optim.AdamW`.

    A row without a learning rate or with a gradient that is not finite keeps its weights and
    moments.

    Args:
        weights: `[p, k]` parameters, one row per member, changed in place.
        gradients: `[p, k]`; used as scratch space.
        exp_avg: `[p, k]` first moments, changed in place.
        exp_avg_sq: `[p, k]` second moments, changed in place.
        steps: Number of each row's step, from 1.
        lrs: Learning rate of each row; None = no step.
        max_norms: Bound on the norm of each row's gradient.
        betas: Decay rates of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled decay, per unit of lr.
        fused: Divide by the root and multiply by the learning rate in one pass over the weights,
            which pays for the many weights of a single row.

    Returns:
        Norms of the gradients before clipping; NaN for rows that took no step.

    Source: Decoupled weight decay regularization (arXiv:1711.05101), algorithm 2.
    """
    # 1. Find the rows that step. All rows are computed and the others restored, so that the bits
    #    of a row do not depend on which other rows step.
    norms: list[float] = torch.linalg.vector_norm(gradients, dim=1).tolist()
    rates: list[float] = []
    idle: list[int] = []
    for row, lr in enumerate(lrs):
        if lr is None or not math.isfinite(norms[row]):
            norms[row] = math.nan
            rates.append(0.0)
            idle.append(row)
        else:
            rates.append(lr)
    if len(idle) == len(norms):
        return norms
    saved = [(matrix, matrix[idle]) for matrix in (weights, exp_avg, exp_avg_sq)]

    # 2. Clip the gradients, as `torch.nn.utils.clip_grad_norm_`. Rows without a step are restored
    #    at the end, so any factor serves.
    factors = []
    for norm, max_norm in zip(norms, max_norms, strict=True):
        if math.isnan(norm):
            factors.append(1.0)
        else:
            factors.append(min(1.0, max_norm / (norm + 1e-6)))
    gradients.mul_(_column(factors, weights))

    # 3. Decay the weights and update the moments.
    if weight_decay:
        decays = [1.0 - lr * weight_decay for lr in rates]
        weights.mul_(_column(decays, weights))
    exp_avg.lerp_(gradients, 1.0 - betas[0])
    exp_avg_sq.mul_(betas[1]).addcmul_(gradients, gradients, value=1.0 - betas[1])

    # 4. Step. The bias correction of the second moment divides the root, that of the first moment
    #    the learning rate.
    root = torch.sqrt(exp_avg_sq, out=gradients)
    corrections = [math.sqrt(1.0 - betas[1] ** step) for step in steps]
    root.div_(_column(corrections, weights)).add_(eps)
    sizes = []
    for lr, step in zip(rates, steps, strict=True):
        sizes.append(-lr / (1.0 - betas[0] ** step))
    if fused:
        assert len(sizes) == 1
        weights.addcdiv_(exp_avg, root, value=_in_range(sizes[0], weights))
    else:
        torch.div(exp_avg, root, out=root)
        weights.addcmul_(root, _column(sizes, weights))

    # 5. Restore the rows without a step.
    for matrix, values in saved:
        matrix[idle] = values
    return norms


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    """Return `[p, 1]` of one value per row, in the dtype and on the device of a tensor."""
    numbers = [_in_range(value, like) for value in values]
    row = torch.tensor(numbers, dtype=like.dtype, device=like.device)
    return row[:, None]


def _in_range(value: float, like: Tensor) -> float:
    """Clamp a number to the tensor's dtype, because torch refuses numbers beyond it.

    The largest learning rate makes the weights infinite, which is detected.
    """
    limit = torch.finfo(like.dtype).max
    return max(-limit, min(limit, value))
