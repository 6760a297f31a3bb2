"""Weights of actions: importance correction for samplers that differ from the trainer, and high-entropy masks."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from evogrpo.config.loss_types import IMPORTANCE_CORRECTIONS
from evogrpo.functional.statistics import numbered

# In nats. Actions after equal tokens are equally uncertain, but beside other rows their entropies round otherwise. More
# than rounding in float32, and less than a difference that could matter.
TIED = 1e-4


def importance_weights(
    kind: str, old_log_probs: Tensor, sampler_log_probs: Tensor, mask: Tensor, cap: float = 2.0
) -> Tensor:
    r"""Weigh losses by how much likelier the trainer found an action than the engine that sampled it.

    The ratio is exp(old - sampler) per action ("token_") or for all of a completion's actions together ("sequence_").
    Above the cap it becomes the cap ("_truncate") or 0 ("_mask").

    Args:
        kind: One of `ImportanceCorrection`.
        old_log_probs: `[n, t]` of the trainer's policy at sampling time, in nats.
        sampler_log_probs: `[n, t]` that the sampler reported, in nats; NaN = unknown, taken as equal.
        mask: `[n, t]` booleans, True = counts.
        cap: Largest ratio, at least 1.

    Returns:
        `[n, t]` weights without gradient, to be multiplied with the policy loss before KL is added; 1 where the mask
        is False.

    Raises:
        ValueError: If `kind` is unknown.

    Source: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025), for
    truncation; Liu et al., "When speed kills stability" (2025), for sequences and masks.
    """
    if kind not in IMPORTANCE_CORRECTIONS:
        raise ValueError(f"importance_correction must be one of {', '.join(IMPORTANCE_CORRECTIONS)}, got {kind!r}")
    level, action = kind.split("_")
    difference = _difference(old_log_probs, sampler_log_probs, mask)
    if level == "sequence":
        difference = difference.sum(1, keepdim=True).expand_as(mask)
    ratio = difference.exp()
    ratio = ratio.clamp(max=cap) if action == "truncate" else torch.where(ratio > cap, 0.0, ratio)
    return torch.where(mask, ratio, 1.0)


class Mismatch(NamedTuple):
    """Difference between the sampler's and the trainer's log-probabilities, over counted actions.

    Attributes:
        mean_difference: Mean of |old - sampler|, in nats.
        max_difference: Largest of them, in nats.
        kl: Estimate of KL(sampler || trainer) per action, in nats.
        min_ratio: Smallest exp(old - sampler).
        mean_ratio: Mean; 1 on average when the sampler's log-probabilities are true.
        max_ratio: Largest.
    """

    mean_difference: float
    max_difference: float
    kl: float
    min_ratio: float
    mean_ratio: float
    max_ratio: float


def mismatch(old_log_probs: Tensor, sampler_log_probs: Tensor, mask: Tensor) -> Mismatch:
    """Measure the difference between sampler and trainer over the actions of `importance_weights`.

    If no action counts, the measures are those of equal policies.
    """
    difference = _difference(old_log_probs, sampler_log_probs, mask)[mask].double()
    if not len(difference):
        return Mismatch(0.0, 0.0, 0.0, 1.0, 1.0, 1.0)
    size, ratio = difference.abs(), difference.exp()
    kl = ratio - difference - 1.0
    values = torch.stack([size.mean(), size.max(), kl.mean(), ratio.min(), ratio.mean(), ratio.max()])
    return Mismatch(*values.tolist())


def _difference(old_log_probs: Tensor, sampler_log_probs: Tensor, mask: Tensor) -> Tensor:
    difference = (old_log_probs - sampler_log_probs).detach()
    return torch.where(mask & ~sampler_log_probs.isnan(), difference, 0.0)


def effective_share(log_ratios: Tensor, sources: Tensor, count: int) -> Tensor:
    r"""Return the effective sample size of each source's actions under another policy, as a share of their number.

    With w = exp(log_ratios) it is (sum w)^2 / (k sum w^2) over the k actions of a source: 1 where all weights are
    equal, 1/k where one of them is all that counts.

    Args:
        log_ratios: `[k]` log-probabilities under the policy that would learn, less those under the one that acted, in
            nats.
        sources: `[k]` which source each action is of, in 0..count - 1.
        count: How many sources there are.

    Returns:
        `[count]` float64 in [0, 1]; NaN for a source without actions.

    Source: Kish, Survey Sampling (1965).
    """
    given = log_ratios.double()
    # A common factor changes nothing: without the largest weight of a source none overflows.
    largest = given.new_full((count,), -math.inf).scatter_reduce(0, sources, given, "amax")
    weights = (given - largest[sources]).exp()
    totals, squares, amounts = (
        given.new_zeros(count).index_add(0, sources, each) for each in (weights, weights**2, torch.ones_like(given))
    )
    return totals**2 / (amounts * squares)


def high_entropy_mask(entropies: Tensor, mask: Tensor, member_ids: Tensor, quantile: float) -> Tensor:
    """Return a mask of each member's actions with the highest entropy.

    The policy loss of the others is left out, while every denominator goes on counting them.

    Args:
        entropies: `[n, t]` in nats.
        mask: `[n, t]` booleans, True = counts.
        member_ids: `[n]` whose completion each row is; every member has a threshold of its own.
        quantile: Share to keep, in (0, 1].

    Returns:
        `[n, t]` booleans, a subset of `mask`; actions as uncertain as the least uncertain one kept are kept too, where
        "as uncertain" means to `TIED` nats.

    Source: "Beyond the 80/20 rule" (arXiv:2506.01939).
    """
    member, members = numbered(member_ids)
    kept = torch.zeros_like(mask)
    for number in range(members):
        own = mask & (member == number)[:, None]
        values = entropies[own]
        if not len(values):
            continue
        # The 1 - quantile point by linear interpolation lies just below this order statistic (or on it).
        rank = math.ceil((1.0 - quantile) * (len(values) - 1) - 1e-9)
        kept |= own & (entropies >= values.kthvalue(rank + 1).values - TIED)
    return kept
