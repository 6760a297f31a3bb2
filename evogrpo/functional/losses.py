"""Per-action losses and the weights that reduce them; every reduction is a weighted sum, so any split adds up."""

import torch
from torch import Tensor

Coefficient = float | Tensor


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, clip_low: Coefficient, clip_high: Coefficient) -> Tensor:
    r"""Return the clipped policy-gradient loss of every action: -min(rho A, clip(rho, 1 - low, 1 + high) A).

    Args:
        log_ratio: `[n, t]` log_probs - old_log_probs, in nats.
        advantages: `[n, 1]` or `[n, t]`, dimensionless.
        clip_low: Distance from 1 to the lower edge of the trust region; a float or `[n, 1]`.
        clip_high: Distance from 1 to its upper edge; a float or `[n, 1]`.

    Returns:
        `[n, t]` losses, to minimise.

    Source: PPO (arXiv:1707.06347), equation 7; DeepSeekMath (arXiv:2402.03300), equation 3.
    """
    ratio = log_ratio.exp()
    low, high = 1.0 - clip_low, 1.0 + clip_high
    bounded = torch.clamp(ratio, low, high)  # type: ignore[arg-type]  # both edges are floats or both tensors
    return -torch.minimum(ratio * advantages, bounded * advantages)


def outside_clip(log_ratio: Tensor, advantages: Tensor, clip_low: Coefficient, clip_high: Coefficient) -> Tensor:
    """Tell for which actions the clip binds, so that the action gives no gradient.

    Args:
        log_ratio: `[n, t]` log_probs - old_log_probs, in nats.
        advantages: `[n, 1]` or `[n, t]`.
        clip_low: As in `clipped_surrogate`.
        clip_high: As in `clipped_surrogate`.

    Returns:
        `[n, t]` booleans.
    """
    ratio = log_ratio.exp()
    return ((ratio > 1.0 + clip_high) & (advantages > 0)) | ((ratio < 1.0 - clip_low) & (advantages < 0))


def kl_k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    r"""Estimate KL(policy || reference) from the taken actions: exp(-d) + d - 1 with d = log_probs - ref_log_probs.

    Unbiased when actions are drawn from the policy, and never negative. d is clamped to +-20 before the exponential.

    Args:
        log_probs: `[n, t]` of the current policy, in nats.
        ref_log_probs: `[n, t]` of the reference policy, in nats.

    Returns:
        `[n, t]` in nats.

    Source: Schulman, "Approximating KL divergence" (2020), k3; DeepSeekMath (arXiv:2402.03300), equation 4.
    """
    difference = (log_probs - ref_log_probs).clamp(-20.0, 20.0)
    return torch.exp(-difference) + difference - 1.0


def action_weights(action_mask: Tensor, member_ids: Tensor, *, per_token: bool) -> Tensor:
    r"""Return the weight of every action in its member's loss, so that sum(weights * losses) is the reduced loss.

    The weights are taken over a whole optimizer step before it is split into micro-batches: any split then adds up
    to the same gradient, and no 1/N over members ever enters.

    Args:
        action_mask: `[n, t]` booleans, True = counts.
        member_ids: `[n]` whose completion each row is.
        per_token: True: every action of a member weighs the same, 1 / (its number of actions), as in DAPO. False:
            every completion weighs the same, 1 / (its member's completions * its actions), as in GRPO.

    Returns:
        `[n, t]` float32; 0 where the mask is False.

    Source: DeepSeekMath (arXiv:2402.03300), equation 3; DAPO (arXiv:2503.14476), equation 8.
    """
    lengths = action_mask.sum(1).float()
    _, member = torch.unique(member_ids, return_inverse=True)
    amount = lengths if per_token else torch.ones_like(lengths)
    totals = torch.zeros(int(member.max()) + 1, device=lengths.device).index_add(0, member, amount)
    weight = 1.0 / totals[member].clamp(min=1.0)
    if not per_token:
        weight = weight / lengths.clamp(min=1.0)
    return torch.where(action_mask, weight[:, None], 0.0)
