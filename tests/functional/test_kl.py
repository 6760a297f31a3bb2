"""KL estimates: exact expectations of values and gradients on three actions."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evogrpo.functional.loss_types import ACTION_KLS
from evogrpo.functional.losses import adaptive_kl, kl_estimate


def policies(seed):
    """Return logits of a policy over three actions and log-probs of its reference."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, dtype=torch.float64, generator=random).requires_grad_()
    return logits, torch.randn(3, dtype=torch.float64, generator=random).log_softmax(0)


def divergence(one, other):
    """Return KL(one || other) in nats, summed over all actions."""
    return (one.exp() * (one - other)).sum()


@pytest.mark.parametrize("seed", range(5))
def test_expected_gradients_as_losses(seed):
    """A loss is differentiated at sampled actions, so the probabilities are constants."""
    logits, reference = policies(seed)
    policy = logits.log_softmax(0)
    gradients = {}
    for kind in ("k1", "k2", "k3"):
        loss = (policy.detach().exp() * kl_estimate(kind, policy, reference)).sum()
        (gradients[kind],) = torch.autograd.grad(loss, logits, retain_graph=True)
    (forward,) = torch.autograd.grad(divergence(policy, reference), logits, retain_graph=True)
    (reverse,) = torch.autograd.grad(divergence(reference, policy), logits)
    torch.testing.assert_close(gradients["k1"], torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(gradients["k2"], forward)
    torch.testing.assert_close(gradients["k3"], reverse)
    assert float(forward.abs().max()) > 1e-3


@given(st.floats(-12, 0), st.floats(-12, 0))
def test_estimates_match_formulas(log_prob, ref_log_prob):
    one = torch.tensor([[log_prob]]).double()
    other = torch.tensor([[ref_log_prob]]).double()
    d = log_prob - ref_log_prob
    formulas = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) + d - 1, "abs": abs(d)}
    assert set(formulas) == set(ACTION_KLS)
    for kind, expected in formulas.items():
        assert float(kl_estimate(kind, one, other)) == pytest.approx(expected, rel=1e-5, abs=1e-5)
        if kind != "k1":
            assert float(kl_estimate(kind, one, other)) >= -1e-12


def test_adaptive_kl_by_hand():
    value = torch.tensor([1.0, 1.0, 2.0, 1.0, 0.5])
    kl = torch.tensor([0.1, 0.11, 5.0, 0.0, 0.09])
    # Errors against 0.1: 0, +0.1, bound +0.2, bound -0.2, -0.1; a tenth of the horizon has passed.
    expected = torch.tensor([1.0, 1.01, 2.04, 0.98, 0.495])
    torch.testing.assert_close(adaptive_kl(value, kl, 0.1, 1000, 100), expected)
