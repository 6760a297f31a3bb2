"""GRPO in Python floats, one action at a time."""

import math
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor


def advantages(rewards: Sequence[float], groups: Sequence[int], eps: float) -> list[float]:
    """Return (r - mean) / (std + eps) of each reward within its group; 0 for equal rewards."""
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        peers = [r for r, g in zip(rewards, groups, strict=True) if g == group and not math.isnan(r)]
        if math.isnan(reward) or len(peers) < 2 or len(set(peers)) == 1:
            result.append(0.0)
        else:
            result.append((reward - statistics.fmean(peers)) / (statistics.stdev(peers) + eps))
    return result


def surrogate(log_ratio: float, advantage: float, clip_low: float, clip_high: float) -> tuple[float, float]:
    """Return one action's clipped loss and its derivative by the log-ratio."""
    ratio = math.exp(log_ratio)
    if advantage > 0 and ratio > 1 + clip_high:
        return -(1 + clip_high) * advantage, 0.0
    if advantage < 0 and ratio < 1 - clip_low:
        return -(1 - clip_low) * advantage, 0.0
    return -ratio * advantage, -ratio * advantage


def member_loss(
    log_probs: Sequence[Tensor],
    old_log_probs: Sequence[Tensor],
    rewards: Sequence[float],
    groups: Sequence[int],
    *,
    clip: float,
    beta: float,
    eps: float = 1e-4,
) -> Tensor:
    """Return one member's GRPO loss: mean over completions of the mean over actions (DeepSeekMath, equation 3).

    The gradient flows through `log_probs`, one tensor `[t]` per completion.
    """
    total = torch.zeros((), dtype=torch.float64)
    for new, old, advantage in zip(log_probs, old_log_probs, advantages(rewards, groups, eps), strict=True):
        for now, then in zip(new.double(), old.double(), strict=True):
            value, slope = surrogate(float((now - then).detach()), advantage, clip, clip)
            action = value + slope * (now - now.detach())
            kl = torch.exp(then - now) - (then - now) - 1
            total = total + (action + beta * kl) / (len(new) * len(log_probs))
    return total
