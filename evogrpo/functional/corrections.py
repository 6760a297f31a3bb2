"""Importance weights for samplers that differ from the trainer, effective sample size, and high-entropy masks."""

import math

import torch
from torch import Tensor

from evogrpo.functional.loss_types import IMPORTANCE_CORRECTIONS
from evogrpo.functional.rewards import consecutive_ids

# In nats. Entropies after equal tokens are equal but for rounding, which depends on the other rows of the batch.
ENTROPY_TOLERANCE = 1e-4


def importance_weights(
    kind: str, old_log_probs: Tensor, sampler_log_probs: Tensor, mask: Tensor, cap: float = 2.0
) -> Tensor:
    r"""Return importance weights: probability ratios of the trainer's policy to the sampler's, bounded by a cap.

    The ratio is exp(old - sampler), of each action ("token_") or of all actions of a completion ("sequence_"). Above
    the cap it becomes the cap ("_truncate") or 0 ("_mask").

    Args:
        kind: One of `ImportanceCorrection`.
        old_log_probs: `[n, t]` log-probabilities of the trainer's policy at sampling time, in nats.
        sampler_log_probs: `[n, t]` log-probabilities that the sampler reported, in nats; NaN = unknown, taken as equal.
        mask: `[n, t]` booleans, True = counts.
        cap: Upper bound of the ratio, at least 1.

    Returns:
        `[n, t]` weights of the policy loss (not of the KL), without gradient; 1 where the mask is False.

    Raises:
        ValueError: If `kind` is unknown.

    Source: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025), for
    truncation; Liu et al., "When speed kills stability" (2025), for sequences and masks.
    """
    if kind not in IMPORTANCE_CORRECTIONS:
        raise ValueError(f"importance_correction must be one of {', '.join(IMPORTANCE_CORRECTIONS)}, got {kind!r}")
    level, action = kind.split("_")
    difference = (old_log_probs - sampler_log_probs).detach()
    difference = torch.where(mask & ~sampler_log_probs.isnan(), difference, 0.0)
    if level == "sequence":
        difference = difference.sum(1, keepdim=True).expand_as(mask)
    ratio = difference.exp()
    ratio = ratio.clamp(max=cap) if action == "truncate" else torch.where(ratio > cap, 0.0, ratio)
    return torch.where(mask, ratio, 1.0)


def effective_sample_fraction(log_ratios: Tensor, sources: Tensor, count: int) -> Tensor:
    r"""Return the effective sample size of each source's actions under another policy, divided by their number.

    With w = exp(log_ratios) it is (sum w)^2 / (k sum w^2) over the k actions of a source: 1 if all weights are equal,
    1/k if one weight dominates.

    Args:
        log_ratios: `[k]` log-probabilities under the learning policy minus those under the acting policy, in nats.
        sources: `[k]` source of each action, from 0 to `count - 1`.
        count: Number of sources.

    Returns:
        `[count]` float64 in [0, 1]; NaN for a source without actions.

    Source: Kish, Survey Sampling (1965).
    """
    logs = log_ratios.double()
    # A common factor cancels. Dividing by the largest weight of a source prevents overflow.
    largest = logs.new_full((count,), -math.inf).scatter_reduce(0, sources, logs, "amax")
    weights = (logs - largest[sources]).exp()
    totals, squares, amounts = (
        logs.new_zeros(count).index_add(0, sources, summands)
        for summands in (weights, weights**2, torch.ones_like(logs))
    )
    return totals**2 / (amounts * squares)


def high_entropy_mask(entropies: Tensor, mask: Tensor, member_ids: Tensor, quantile: float) -> Tensor:
    """Return a mask of each member's actions with the highest entropy.

    The policy loss of other actions is left out, but they still count in every denominator.

    Args:
        entropies: `[n, t]` in nats.
        mask: `[n, t]` booleans, True = counts.
        member_ids: `[n]` member of each row; each member has its own threshold.
        quantile: Fraction to keep, in (0, 1].

    Returns:
        `[n, t]` booleans, a subset of `mask`. Actions within `ENTROPY_TOLERANCE` nats of the threshold are kept too.

    Source: "Beyond the 80/20 rule" (arXiv:2506.01939).
    """
    member, members = consecutive_ids(member_ids)
    selected = torch.zeros_like(mask)
    for number in range(members):
        member_actions = mask & (member == number)[:, None]
        values = entropies[member_actions]
        if not len(values):
            continue
        # The 1 - quantile point by linear interpolation lies just below this order statistic (or on it).
        rank = math.ceil((1.0 - quantile) * (len(values) - 1) - 1e-9)
        selected |= member_actions & (entropies >= values.kthvalue(rank + 1).values - ENTROPY_TOLERANCE)
    return selected
