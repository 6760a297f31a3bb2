"""KL divergence to the reference policy: estimates from sampled actions, closed forms, adaptive coefficient."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from evogrpo.functional.loss_types import ACTION_KLS


def kl_estimate(kind: str, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    r"""Estimate KL(policy || reference) from sampled actions, with d = log_probs - ref_log_probs.

    - "k1": d. Unbiased, of any sign. As a loss its expected gradient is 0: use it in rewards.
    - "k2": d^2 / 2. Biased but never negative. As a loss its expected gradient is that of KL(policy || reference).
    - "k3": exp(-d) + d - 1. Unbiased and never negative. As a loss its expected gradient is that of
      KL(reference || policy), which is the same to first order around the reference.
    - "abs": |d|.

    Unbiased: in expectation over actions sampled from the policy. d is clamped to +-20 before the exponential.

    Args:
        kind: One of `ActionKl`.
        log_probs: `[n, t]` log-probabilities of the current policy, in nats.
        ref_log_probs: `[n, t]` log-probabilities of the reference policy, in nats.

    Returns:
        `[n, t]` in nats.

    Raises:
        ValueError: If `kind` is unknown.

    Source: Schulman, "Approximating KL divergence" (2020); DeepSeekMath (arXiv:2402.03300), equation 4, for k3.
    """
    difference = log_probs - ref_log_probs
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference**2 / 2
    if kind == "k3":
        # E[exp(-d)] = sum_a p(a) q(a) / p(a) = 1, so exp(-d) - 1 has mean 0 and only lowers the variance of d.
        difference = difference.clamp(-20.0, 20.0)
        return torch.exp(-difference) + difference - 1.0
    if kind == "abs":
        return difference.abs()
    raise ValueError(f"kl_estimator must be one of {', '.join(ACTION_KLS)}, got {kind!r}")


def categorical_kl(first: Tensor, second: Tensor) -> Tensor:
    r"""Return KL(first || second) = sum_a p(a) (log p(a) - log q(a)) of categorical distributions.

    Args:
        first: Logits of p, `[..., v]`; excluded values have large negative logits in both.
        second: Logits of q, `[..., v]`.

    Returns:
        `[...]` in nats.
    """
    log_p, log_q = first.log_softmax(-1), second.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def bernoulli_kl(first: Tensor, second: Tensor) -> Tensor:
    """Return KL(first || second) of independent bits with logits `[..., b]`, summed over bits: `[...]` in nats."""
    high = torch.sigmoid(first) * (logsigmoid(first) - logsigmoid(second))
    low = torch.sigmoid(-first) * (logsigmoid(-first) - logsigmoid(-second))
    return (high + low).sum(-1)


def gaussian_kl(mean: Tensor, log_std: Tensor, other_mean: Tensor, other_log_std: Tensor) -> Tensor:
    r"""Return KL(N(m, s) || N(m', s')) = log(s' / s) + (s^2 + (m - m')^2) / (2 s'^2) - 1/2, summed over dimensions.

    Args:
        mean: `[..., k]`; the dimensions are independent.
        log_std: `[..., k]` logarithms of the standard deviations.
        other_mean: `[..., k]` of the second distribution, in the same units.
        other_log_std: `[..., k]`.

    Returns:
        `[...]` in nats.
    """
    # With r = log(s / s'): (exp(2 r) - 1) / 2 - r = log(s' / s) + s^2 / (2 s'^2) - 1/2, exact near r = 0 by expm1.
    log_ratio = log_std - other_log_std
    distance = (mean - other_mean) * torch.exp(-other_log_std)
    return ((torch.expm1(2 * log_ratio) + distance.square()) / 2 - log_ratio).sum(-1)


def adaptive_kl(value: Tensor, kl: Tensor, target: float, horizon: int, n: int) -> Tensor:
    r"""Adapt the KL coefficient to a target divergence: value (1 + clip(kl / target - 1, +-0.2) n / horizon).

    Args:
        value: Coefficients, or factors on them, any shape.
        kl: Measured divergence in nats, the same shape.
        target: Target divergence in nats, above 0.
        horizon: Number of samples over which the coefficient changes by at most a fifth, at least 1.
        n: Number of samples in the measurement.

    Returns:
        The new coefficients.

    Source: Ziegler et al. (arXiv:1909.08593), section 2.2.
    """
    return value * (1.0 + (kl / target - 1.0).clamp(-0.2, 0.2) * n / horizon)
