"""Loss of every action: policy losses, KL estimates, importance weights, masks and reduction.

Every reduction is a weighted sum over actions.
"""

import math

import torch
from torch import Tensor

from evogrpo.functional.loss_types import LOSS_TYPES, LossProperties
from evogrpo.functional.rewards import consecutive_ids

ROUNDING = 1e-4
"""Bound on the rounding error of entropies and differences of log-probabilities, in nats.

Rounding depends on the other rows of the batch, so nothing may be decided by smaller differences. A
float32 sum of K terms is off by about sqrt(K) u of its terms' sizes, with u = 2^-24 (Higham and
Mary, 2019). For logits of 10 from K = 4,096 products that is 4e-5 nats for each log-probability,
and at most twice as much for a difference.
"""


def policy_loss(
    loss_type: str,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float | Tensor,
    clip_high: float | Tensor,
    dual_clip: float | Tensor | None = None,
    delta: float | Tensor | None = None,
    sapo_tau_positive: float = 1.0,
    sapo_tau_negative: float = 1.05,
    cispo_clip_low: bool = False,
) -> Tensor:
    r"""Return the loss of every action, to be minimised.

    `loss_weights` reduces it to the loss type's formula.

    With d = log_probs - old_log_probs and rho = exp(d), d clamped to +-20 before an exponential:

    - "grpo", "dapo", "bnpo", "dr_grpo": -min(rho A, clip(rho, 1 - low, 1 + high) A). They differ in
      their reduction.
    - "gspo", "luspo": the same with one ratio per completion, rho = exp(mean of d over its
      actions).
    - "cispo": -min(rho, 1 + high) A log_probs; the first factor carries no gradient.
    - "sapo": -A sigmoid(tau (rho - 1)) 4 / tau, with one tau for A > 0 and one for the others.
    - "gmpo": -A exp(mean of d' over the completion), with d' = min(d, high) where A > 0 and
      max(d, -low) where A < 0.

    Args:
        loss_type: One of `LossType`.
        log_probs: `[n, t]` log-probabilities of the current policy, in nats, with gradient.
        old_log_probs: `[n, t]` log-probabilities at sampling time, in nats, without gradient.
        advantages: `[n, 1]` or `[n, t]`, dimensionless.
        mask: `[n, t]` booleans, True = counts; where it is False, other tensors may have any value.
        clip_low: Half-width of the clipping interval below 1 (below 0 for "gmpo"); a float or
            `[n, 1]`.
        clip_high: Half-width above; a float or `[n, 1]`.
        dual_clip: Where A < 0 the loss is at most `-dual_clip * A`; above 1. None = unbounded. Read
            by the first two of these forms only, as `delta`.
        delta: Upper bound of the unclipped rho, above 1 + clip_high. None = unbounded.
        sapo_tau_positive: Temperature tau of "sapo" where A > 0, above 0.
        sapo_tau_negative: Temperature tau elsewhere, above 0.
        cispo_clip_low: Also bound the factor of "cispo" from below, at 1 - clip_low.

    Returns:
        `[n, t]` losses; 0 where the mask is False.

    Source: PPO (arXiv:1707.06347), equation 7; GSPO (arXiv:2507.18071); CISPO (arXiv:2506.13585);
    SAPO (arXiv:2511.20347); GMPO (arXiv:2507.20673); dual clip (arXiv:1912.09729); delta
    (arXiv:2505.07291).
    """
    # 1. Clear the padding: NaN there times 0 would be a gradient of NaN.
    loss = LOSS_TYPES[loss_type]
    log_ratios = torch.where(mask, log_probs - old_log_probs, 0.0)
    advantages = torch.where(mask, advantages, 0.0)
    # 2. Losses min(rho A, clipped rho A), with their two optional bounds.
    if loss.bounded:
        ratio = _ratios(loss, log_ratios, mask)
        if delta is None:
            unclipped = ratio
        else:
            unclipped = ratio.clamp(max=delta)
        clipped = _clamp(ratio, 1.0 - clip_low, 1.0 + clip_high)
        losses = -torch.minimum(unclipped * advantages, clipped * advantages)
        if dual_clip is not None:
            bounded = torch.minimum(losses, -dual_clip * advantages)
            losses = torch.where(advantages < 0, bounded, losses)
        return torch.where(mask, losses, 0.0)
    # 3. Losses with a form of their own.
    if loss_type == "cispo":
        # Detached: the clip bounds the size of a gradient, but never removes it.
        factor = _exp(log_ratios.detach()).clamp(max=1.0 + clip_high)
        if cispo_clip_low:
            factor = factor.clamp(min=1.0 - clip_low)
        losses = -factor * advantages * log_probs
    elif loss_type == "sapo":
        positive = (advantages > 0).to(log_probs.dtype)
        tau = sapo_tau_positive * positive + sapo_tau_negative * (1.0 - positive)
        # 4 / tau makes the derivative at rho = 1 that of rho itself: sigmoid'(0) = 1 / 4.
        gate = torch.sigmoid(tau * (_exp(log_ratios) - 1.0))
        losses = -advantages * gate * 4.0 / tau
    else:
        assert loss_type == "gmpo"
        # d' is chosen so that d' A = min(d A, clip(d) A).
        sign = advantages.sign()
        within = _clamp(log_ratios, -clip_low, clip_high)
        clipped = sign * torch.minimum(sign * log_ratios, sign * within)
        losses = -advantages * _exp(_sequence_mean(clipped, mask))
    return torch.where(mask, losses, 0.0)


def clipped_actions(
    loss_type: str,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float | Tensor,
    clip_high: float | Tensor,
    cispo_clip_low: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return masks of the actions where the lower and the upper clip bind.

    Their means are the clip fractions.

    A clip binds where it removes the gradient. In "cispo" it removes none, so its clips bind for
    advantages of either sign. "sapo" has no clip. Actions with advantage 0 are never counted.
    Arguments are those of `policy_loss`.

    Returns:
        Two `[n, t]` booleans, low and high; False where the mask is False.
    """
    loss = LOSS_TYPES[loss_type]
    if not loss.clips:
        return torch.zeros_like(mask), torch.zeros_like(mask)
    # 1. Find the ratios outside the clipping interval.
    log_ratios = torch.where(mask, log_probs.detach() - old_log_probs, 0.0)
    if loss.ratio == "geometric mean":
        below = log_ratios < -clip_low
        above = log_ratios > clip_high
    else:
        ratio = _ratios(loss, log_ratios, mask)
        below = ratio < 1.0 - clip_low
        above = ratio > 1.0 + clip_high
    # 2. Keep those where the clip applies.
    if loss_type == "cispo":
        has_advantage = mask & (advantages != 0)
        return below & has_advantage & cispo_clip_low, above & has_advantage
    # The minimum takes the clipped term where clipping makes rho A smaller: above for A > 0, below
    # for A < 0.
    below = below & mask & (advantages < 0)
    above = above & mask & (advantages > 0)
    return below, above


def loss_weights(
    loss_type: str,
    aggregation: str | None,
    mask: Tensor,
    member_ids: Tensor,
    max_completion_length: int | None = None,
) -> Tensor:
    r"""Return the weight of every action in its member's loss.

    The reduced loss is sum(weights * losses). With n completions of the member, the weight of an
    action is

    - "token-mean": 1 / (all counted actions of the member);
    - "seq-mean-token-sum": 1 / n;
    - "seq-mean-token-mean": 1 / (n * actions of the completion);
    - "seq-mean-token-sum-norm": 1 / (n * max_completion_length).

    Weights are computed over a whole optimizer step before it is split into micro-batches, so any
    split of whole rows gives the same gradient. Members are summed, not averaged. A completion
    without counted actions still counts in n.

    Args:
        loss_type: One of `LossType`; determines the aggregation if that is None.
        aggregation: One of `Aggregation`, or None.
        mask: `[n, t]` booleans, True = counts, of all rows of the optimizer step.
        member_ids: `[n]` member of each row, from 0.
        max_completion_length: Maximum number of actions; needed by "seq-mean-token-sum-norm".

    Returns:
        `[n, t]` float32; 0 where the mask is False.

    Source: DeepSeekMath (arXiv:2402.03300), equation 3; DAPO (arXiv:2503.14476), equation 8; Dr.
    GRPO (arXiv:2503.20783); the names are verl's and ROLL's.
    """
    # 1. Count actions and completions of each member.
    mode = aggregation or LOSS_TYPES[loss_type].aggregation
    lengths = mask.sum(1)
    members = 0
    if len(member_ids):
        members = int(member_ids.max()) + 1
    zeros = torch.zeros(members, dtype=torch.float64, device=mask.device)
    ones = torch.ones_like(lengths, dtype=torch.float64)
    completions = zeros.index_add(0, member_ids, ones)[member_ids]
    # 2. The weight of an action is one over its row's divisor.
    if mode == "token-mean":
        divisor = zeros.index_add(0, member_ids, lengths.double())[member_ids]
    elif mode == "seq-mean-token-sum":
        divisor = completions
    elif mode == "seq-mean-token-mean":
        divisor = completions * lengths
    else:
        assert mode == "seq-mean-token-sum-norm" and max_completion_length is not None
        divisor = completions * max_completion_length
    # Rows without actions have divisor 0.
    weights = 1.0 / divisor.clamp(min=1.0)
    return torch.where(mask, weights[:, None], 0.0).float()


def _ratios(loss: LossProperties, log_ratios: Tensor, mask: Tensor) -> Tensor:
    """Return probability ratios `[n, t]`, one per completion or one per action."""
    if loss.ratio == "completion":
        log_ratios = _sequence_mean(log_ratios, mask)
    return _exp(log_ratios)


def _sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return `[n, t]`: each row's mean over the actions that count, repeated in every column."""
    total = torch.where(mask, values, 0.0).sum(1, keepdim=True)
    count = mask.sum(1, keepdim=True).clamp(min=1)
    return (total / count).expand_as(mask)


def _exp(log_ratios: Tensor) -> Tensor:
    # An infinite ratio times the zero gradient of a clip would be NaN.
    return log_ratios.clamp(-20.0, 20.0).exp()


def _clamp(values: Tensor, low: float | Tensor, high: float | Tensor) -> Tensor:
    # Two calls: one bound may be a float and the other a tensor.
    return values.clamp(min=low).clamp(max=high)


# ---- KL divergence to the reference policy


def kl_estimate(kind: str, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    r"""Estimate KL(policy || reference) from sampled actions, with d = log_probs - ref_log_probs.

    - "k1": d. Unbiased, of any sign. As a loss its expected gradient is 0: use it in rewards.
    - "k2": d^2 / 2. Biased but never negative. As a loss its expected gradient is that of KL(policy
      || reference).
    - "k3": exp(-d) + d - 1. Unbiased and never negative. As a loss its expected gradient is that of
      KL(reference || policy), which is the same to first order around the reference.
    - "abs": |d|. Its gradient is 0 where |d| is at most `ROUNDING`: the sign of a rounding error is
      random.

    Unbiased: in expectation over actions sampled from the policy. d is clamped to +-20 before the
    exponential.

    Args:
        kind: One of `ActionKl`.
        log_probs: `[n, t]` log-probabilities of the current policy, in nats.
        ref_log_probs: `[n, t]` log-probabilities of the reference policy, in nats.

    Returns:
        `[n, t]` in nats.

    Source: Schulman, "Approximating KL divergence" (2020); DeepSeekMath (arXiv:2402.03300),
    equation 4, for k3.
    """
    difference = log_probs - ref_log_probs
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference**2 / 2
    if kind == "k3":
        # E[exp(-d)] = sum_a p(a) q(a) / p(a) = 1, so exp(-d) - 1 has mean 0 and only lowers the
        # variance of d.
        difference = difference.clamp(-20.0, 20.0)
        return torch.exp(-difference) + difference - 1.0
    assert kind == "abs"
    beyond_rounding = difference.detach().abs() > ROUNDING
    return torch.where(beyond_rounding, difference, difference.detach()).abs()


def bias_corrected_kl(
    kl: Tensor, loss_type: str, log_probs: Tensor, old_log_probs: Tensor, mask: Tensor
) -> Tensor:
    r"""Multiply estimates of the KL by the ratio, with its gradient.

    The expected gradient is then that of the estimate under the current policy, although the old
    policy acted. For k3 that is the gradient of KL(policy || reference).

    Args:
        kl: `[n, t]` as `kl_estimate` returns them, in nats.
        loss_type: Determines the ratio: the completion's for "gspo" and "luspo", otherwise the
            action's.
        log_probs: `[n, t]` log-probabilities of the current policy, in nats.
        old_log_probs: `[n, t]` log-probabilities of the policy that acted, in nats.
        mask: `[n, t]` booleans, True = counts.

    Returns:
        `[n, t]` in nats.

    Source: DeepSeek-V3.2 (arXiv:2512.02556); TRL's `use_bias_correction_kl`.
    """
    log_ratios = torch.where(mask, log_probs - old_log_probs, 0.0)
    # E_old[rho f] = E_current[f], and the gradient of rho adds the dependence of the sampling.
    return kl * _ratios(LOSS_TYPES[loss_type], log_ratios, mask)


def adaptive_kl(value: Tensor, kl: Tensor, target: float, horizon: int, n: int) -> Tensor:
    r"""Adapt the KL coefficient: value (1 + clip(kl / target - 1, +-0.2) n / horizon).

    Args:
        value: Coefficients, or factors on them, any shape.
        kl: Measured divergence in nats, the same shape.
        target: Target divergence in nats, above 0.
        horizon: Number of samples over which the coefficient changes by at most a fifth, at least
            1.
        n: Number of samples in the measurement.

    Returns:
        The new coefficients.

    Source: Ziegler et al. (arXiv:1909.08593), section 2.2.
    """
    error = (kl / target - 1.0).clamp(-0.2, 0.2)
    return value * (1.0 + error * n / horizon)


# ---- importance weights, and masks by entropy


def importance_weights(
    kind: str, old_log_probs: Tensor, sampler_log_probs: Tensor, mask: Tensor, cap: float = 2.0
) -> Tensor:
    r"""Return importance weights: ratios of the trainer's policy to the sampler's, up to a cap.

    The ratio is exp(old - sampler), of each action ("token_") or of all actions of a completion
    ("sequence_"). Above the cap it becomes the cap ("_truncate") or 0 ("_mask").

    Args:
        kind: One of `ImportanceCorrection`.
        old_log_probs: `[n, t]` log-probabilities of the trainer's policy at sampling time, in nats.
        sampler_log_probs: `[n, t]` log-probabilities that the sampler reported, in nats; NaN =
            unknown, taken as equal.
        mask: `[n, t]` booleans, True = counts.
        cap: Upper bound of the ratio, at least 1.

    Returns:
        `[n, t]` weights of the policy loss (not of the KL), without gradient; 1 where the mask is
        False.

    Source: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training"
    (2025), for truncation; Liu et al., "When speed kills stability" (2025), for sequences and
    masks.
    """
    # For example "token_mask".
    level, treatment = kind.split("_")
    difference = (old_log_probs - sampler_log_probs).detach()
    difference = torch.where(mask & ~sampler_log_probs.isnan(), difference, 0.0)
    if level == "sequence":
        difference = difference.sum(1, keepdim=True).expand_as(mask)
    ratio = difference.exp()
    if treatment == "truncate":
        ratio = ratio.clamp(max=cap)
    else:
        ratio = torch.where(ratio > cap, 0.0, ratio)
    return torch.where(mask, ratio, 1.0)


def high_entropy_mask(
    entropies: Tensor, mask: Tensor, member_ids: Tensor, quantile: float
) -> Tensor:
    """Return a mask of each member's actions with the highest entropy.

    The policy loss of other actions is left out, but they still count in every denominator.

    Args:
        entropies: `[n, t]` in nats.
        mask: `[n, t]` booleans, True = counts.
        member_ids: `[n]` member of each row; each member has its own threshold.
        quantile: Fraction to keep, in (0, 1].

    Returns:
        `[n, t]` booleans, a subset of `mask`. Actions within `ROUNDING` nats of the threshold are
        kept too.

    Source: "Beyond the 80/20 rule" (arXiv:2506.01939).
    """
    member, members = consecutive_ids(member_ids)
    selected = torch.zeros_like(mask)
    for number in range(members):
        member_actions = mask & (member == number)[:, None]
        values = entropies[member_actions]
        if not len(values):
            continue
        # The 1 - quantile point by linear interpolation lies just below this order statistic (or on
        # it).
        last = len(values) - 1
        rank = math.ceil((1.0 - quantile) * last - 1e-9)
        threshold = values.kthvalue(rank + 1).values - ROUNDING
        selected |= member_actions & (entropies >= threshold)
    return selected
