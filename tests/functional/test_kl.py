"""KL estimates and closed forms: exact expectations of values and gradients on three actions."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributions as laws

from evogrpo.functional.kl import adaptive_kl, bernoulli_kl, categorical_kl, gaussian_kl, kl_estimate
from evogrpo.functional.loss_types import ACTION_KLS


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
    one, other = torch.tensor([[log_prob]]).double(), torch.tensor([[ref_log_prob]]).double()
    d = log_prob - ref_log_prob
    formulas = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) + d - 1, "abs": abs(d)}
    assert set(formulas) == set(ACTION_KLS)
    for kind, expected in formulas.items():
        assert float(kl_estimate(kind, one, other)) == pytest.approx(expected, rel=1e-5, abs=1e-5)
        if kind != "k1":
            assert float(kl_estimate(kind, one, other)) >= -1e-12


CLOSED = {
    "categorical": (categorical_kl, lambda x: laws.Categorical(logits=x)),
    "bernoulli": (bernoulli_kl, lambda x: laws.Independent(laws.Bernoulli(logits=x), 1)),
    "gaussian": (
        lambda one, other: gaussian_kl(one[:, :2], one[:, 2:], other[:, :2], other[:, 2:]),
        lambda x: laws.Independent(laws.Normal(x[:, :2], x[:, 2:].exp()), 1),
    ),
}


@pytest.mark.parametrize("size", [1e-3, 1.0, 6.0])
@pytest.mark.parametrize("law", CLOSED)
def test_closed_forms_and_gradients_match_torch(law, size):
    divergence_of, made = CLOSED[law]
    random = torch.Generator().manual_seed(1)
    pair = [(size * torch.randn(6, 4, dtype=torch.float64, generator=random)).requires_grad_() for _ in range(2)]
    found, expected = divergence_of(*pair), laws.kl_divergence(*map(made, pair))
    torch.testing.assert_close(found, expected)
    assert float(found.detach().min()) > 0
    weights = torch.arange(6.0, dtype=torch.float64)
    for one, other in zip(
        torch.autograd.grad((weights * found).sum(), pair),
        torch.autograd.grad((weights * expected).sum(), pair),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
        assert bool(one[1:].any(1).all())


@pytest.mark.parametrize("law", CLOSED)
def test_kl_to_itself_is_exactly_zero(law):
    same = 3 * torch.randn(5, 4, generator=torch.Generator().manual_seed(2))
    own = same.clone().requires_grad_()
    for pair in ((own, same), (same, own)):
        value = CLOSED[law][0](*pair)
        assert torch.equal(value, torch.zeros(5))
        (slope,) = torch.autograd.grad(value.sum(), own)
        torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0, atol=1e-6)


def test_values_excluded_in_both_have_no_effect():
    logits, other = torch.tensor([[0.3, -1e9, 1.0]], requires_grad=True), torch.tensor([[1.0, -1e9, -0.5]])
    value = categorical_kl(logits, other)
    expected = laws.kl_divergence(*(laws.Categorical(logits=each.detach()[:, [0, 2]]) for each in (logits, other)))
    torch.testing.assert_close(value.detach(), expected)
    value.sum().backward()
    assert logits.grad[0, 1] == 0
    assert bool(logits.grad.isfinite().all())


def test_adaptive_kl_by_hand():
    value, kl = torch.tensor([1.0, 1.0, 2.0, 1.0, 0.5]), torch.tensor([0.1, 0.11, 5.0, 0.0, 0.09])
    # Errors against 0.1: 0, +0.1, bound +0.2, bound -0.2, -0.1; a tenth of the horizon has passed.
    expected = torch.tensor([1.0, 1.01, 2.04, 0.98, 0.495])
    torch.testing.assert_close(adaptive_kl(value, kl, 0.1, 1000, 100), expected)
