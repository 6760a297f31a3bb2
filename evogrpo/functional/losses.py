"""Losses per action, and the weights that reduce them: every reduction is a weighted sum, so micro-batches add up."""

import torch
from torch import Tensor

from evogrpo.config.loss_types import AGGREGATIONS, LOSS_TYPES, LossFacts

Coefficient = float | Tensor


def policy_loss(
    loss_type: str,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: Coefficient,
    clip_high: Coefficient,
    dual_clip: Coefficient | None = None,
    delta: Coefficient | None = None,
    sapo_tau_positive: float = 1.0,
    sapo_tau_negative: float = 1.05,
    cispo_clip_low: bool = False,
) -> Tensor:
    r"""Return the loss of every action, to minimise; `loss_weights` reduces it to the formula of the loss type.

    With d = log_probs - old_log_probs and rho = exp(d), d clamped to +-20 before an exponential:

    - "grpo", "dapo", "bnpo", "dr_grpo": -min(rho A, clip(rho, 1 - low, 1 + high) A). They differ in their reduction.
    - "gspo", "luspo": the same with rho = exp(mean of d over the completion), the same for all its actions.
    - "cispo": -min(rho, 1 + high) A log_probs, the factor without gradient.
    - "sapo": -A sigmoid(tau (rho - 1)) 4 / tau, with one tau for A > 0 and one for the others.
    - "gmpo": -A exp(mean of d' over the completion), d' = d clipped to [-low, high] on the side where A would push
      it further out.

    Args:
        loss_type: One of `LossType`.
        log_probs: `[n, t]` of the current policy, in nats; they carry the gradient.
        old_log_probs: `[n, t]` at sampling time, in nats, without gradient.
        advantages: `[n, 1]` or `[n, t]`, dimensionless.
        mask: `[n, t]` booleans, True = counts; where it is False the other tensors may hold anything.
        clip_low: Distance from 1 to the lower edge of the trust region (from 0 for "gmpo"); a float or `[n, 1]`.
        clip_high: Distance from 1 to its upper edge; a float or `[n, 1]`.
        dual_clip: Where A < 0 the loss is at most `-dual_clip * A`; above 1. None = unbounded.
        delta: Upper bound of the unclipped rho, above 1 + clip_high. None = unbounded.
        sapo_tau_positive: Steepness where A > 0, above 0.
        sapo_tau_negative: Steepness elsewhere, above 0.
        cispo_clip_low: Bound the factor of "cispo" from below too, at 1 - clip_low.

    Returns:
        `[n, t]` losses; 0 where the mask is False.

    Raises:
        ValueError: If `loss_type` is unknown, or has no ratio that `dual_clip` or `delta` could bound.

    Source: PPO (arXiv:1707.06347), equation 7; GSPO (arXiv:2507.18071); CISPO (arXiv:2506.13585); SAPO
    (arXiv:2511.20347); GMPO (arXiv:2507.20673); dual clip (arXiv:1912.09729); delta (arXiv:2505.07291).
    """
    facts = _facts(loss_type)
    difference = _differences(log_probs, old_log_probs, mask)
    advantages = torch.where(mask, advantages, 0.0)  # 0 times NaN in the padding would be a gradient of NaN
    if facts.bounded:
        ratio = _ratios(facts, difference, mask)
        free = ratio if delta is None else _below(ratio, delta)
        losses = -torch.minimum(free * advantages, _between(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantages)
        if dual_clip is not None:
            losses = torch.where(advantages < 0, torch.minimum(losses, -dual_clip * advantages), losses)
        return torch.where(mask, losses, 0.0)
    if dual_clip is not None or delta is not None:
        raise ValueError(f"dual_clip and delta bound a probability ratio in the loss; {loss_type!r} has none to bound")
    if loss_type == "cispo":
        factor = _below(_exp(difference.detach()), 1.0 + clip_high)
        if cispo_clip_low:
            factor = _above(factor, 1.0 - clip_low)
        losses = -factor * advantages * log_probs
    elif loss_type == "sapo":
        positive = (advantages > 0).to(log_probs.dtype)
        tau = sapo_tau_positive * positive + sapo_tau_negative * (1.0 - positive)
        losses = -advantages * torch.sigmoid(tau * (_exp(difference) - 1.0)) * 4.0 / tau
    else:
        assert loss_type == "gmpo"
        sign = advantages.sign()
        outward = sign * torch.minimum(sign * difference, sign * _between(difference, -clip_low, clip_high))
        losses = -advantages * _exp(_sequence_mean(outward, mask))
    return torch.where(mask, losses, 0.0)


def clipped_actions(
    loss_type: str,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: Coefficient,
    clip_high: Coefficient,
    cispo_clip_low: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the actions at which the lower and the upper clip bind; their means are the clip fractions.

    A bound ratio gives no gradient where the clip cuts it off; "cispo" goes on learning at the bound, so its clips
    bind whatever the sign of the advantage. "sapo" has no clip. Actions without advantage are never counted. The
    arguments are those of `policy_loss`.

    Returns:
        Two `[n, t]` booleans, low and high; False where the mask is False.

    Raises:
        ValueError: If `loss_type` is unknown.
    """
    facts = _facts(loss_type)
    if not facts.clips:
        return torch.zeros_like(mask), torch.zeros_like(mask)
    difference = _differences(log_probs.detach(), old_log_probs, mask)
    if facts.ratio == "geometric mean":
        below, above = difference < -clip_low, difference > clip_high
    else:
        ratio = _ratios(facts, difference, mask)
        below, above = ratio < 1.0 - clip_low, ratio > 1.0 + clip_high
    if loss_type == "cispo":
        teaches = mask & (advantages != 0)
        return below & teaches & cispo_clip_low, above & teaches
    return below & mask & (advantages < 0), above & mask & (advantages > 0)


def loss_weights(
    loss_type: str,
    aggregation: str | None,
    mask: Tensor,
    member_ids: Tensor,
    max_completion_length: int | None = None,
) -> Tensor:
    r"""Return the weight of every action in its member's loss, so that sum(weights * losses) is the reduced loss.

    With n completions of the member and m actions that count, the weight of an action is

    - "token-mean": 1 / (all actions of the member);
    - "seq-mean-token-sum": 1 / n;
    - "seq-mean-token-mean": 1 / (n * actions of the completion);
    - "seq-mean-token-sum-norm": 1 / (n * max_completion_length).

    The weights are taken over a whole optimizer step before it is split into micro-batches: any split of whole rows
    then adds up to the same gradient, and no 1/N over members ever enters. Padding and completions that hold no
    counted action weigh nothing, but the latter count in n.

    Args:
        loss_type: One of `LossType`; names the aggregation when that is None.
        aggregation: One of `Aggregation`, or None.
        mask: `[n, t]` booleans, True = counts, of all rows of the optimizer step.
        member_ids: `[n]` whose completion each row is, counted from 0.
        max_completion_length: In actions; needed by "seq-mean-token-sum-norm".

    Returns:
        `[n, t]` float32; 0 where the mask is False.

    Raises:
        ValueError: If the loss type or aggregation is unknown, or the maximum length is missing.

    Source: DeepSeekMath (arXiv:2402.03300), equation 3; DAPO (arXiv:2503.14476), equation 8; Dr. GRPO
    (arXiv:2503.20783); the names are verl's and ROLL's.
    """
    facts = _facts(loss_type)
    mode = facts.aggregation if aggregation is None else aggregation
    lengths = mask.sum(1)
    zeros = torch.zeros(int(member_ids.max()) + 1 if len(member_ids) else 0, dtype=torch.float64, device=mask.device)
    completions = zeros.index_add(0, member_ids, torch.ones_like(lengths, dtype=torch.float64))[member_ids]
    if mode == "token-mean":
        divisor = zeros.index_add(0, member_ids, lengths.double())[member_ids]
    elif mode == "seq-mean-token-sum":
        divisor = completions
    elif mode == "seq-mean-token-mean":
        divisor = completions * lengths
    elif mode == "seq-mean-token-sum-norm":
        if max_completion_length is None or max_completion_length < 1:
            raise ValueError(f"{mode} divides by max_completion_length, got {max_completion_length}: give at least 1")
        divisor = completions * max_completion_length
    else:
        raise ValueError(f"aggregation must be one of {', '.join(AGGREGATIONS)}, got {aggregation!r}")
    return torch.where(mask, 1.0 / divisor.clamp(min=1.0)[:, None], 0.0).float()


def bias_corrected(kl: Tensor, loss_type: str, log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    r"""Multiply estimates of the KL by the ratio, with its gradient.

    The gradient is then, on average, that of the estimate's mean over actions of the current policy, though the actions
    are the old one's: for k3 that is the gradient of KL(policy || reference).

    Args:
        kl: `[n, t]` as `kl_estimate` returns them, in nats.
        loss_type: Which ratio it is: the completion's for "gspo" and "luspo", otherwise the action's, for "gmpo" too,
            which clips every action's own ratio before it takes their geometric mean.
        log_probs: `[n, t]` of the current policy, in nats.
        old_log_probs: `[n, t]` of the policy that acted, in nats.
        mask: `[n, t]` booleans, True = counts.

    Returns:
        `[n, t]` in nats.

    Source: DeepSeek-V3.2 (arXiv:2512.02556); TRL's `use_bias_correction_kl`.
    """
    return kl * _ratios(_facts(loss_type), _differences(log_probs, old_log_probs, mask), mask)


def _facts(loss_type: str) -> LossFacts:
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"loss_type must be one of {', '.join(LOSS_TYPES)}, got {loss_type!r}")
    return LOSS_TYPES[loss_type]


def _differences(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, log_probs - old_log_probs, 0.0)


def _ratios(facts: LossFacts, difference: Tensor, mask: Tensor) -> Tensor:
    """Return probability ratios: one per completion, or one per action."""
    return _exp(_sequence_mean(difference, mask) if facts.ratio == "completion" else difference)


def _sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    mean = torch.where(mask, values, 0.0).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return mean.expand_as(mask)


def _exp(difference: Tensor) -> Tensor:
    # An infinite ratio times the zero gradient of a clip would be NaN.
    return difference.clamp(-20.0, 20.0).exp()


def _below(values: Tensor, high: Coefficient) -> Tensor:
    return values.clamp(max=high)


def _above(values: Tensor, low: Coefficient) -> Tensor:
    return values.clamp(min=low)


def _between(values: Tensor, low: Coefficient, high: Coefficient) -> Tensor:
    return _below(_above(values, low), high)  # one edge may be a float and the other a tensor
