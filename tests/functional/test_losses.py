"""Losses against scalar oracles, exact expectations and the identities their reductions promise."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evogrpo.functional.losses import action_weights, clipped_surrogate, kl_k3, outside_clip
from tests.oracles import scalar_grpo

RATIOS = torch.linspace(-1.0, 1.0, 41, dtype=torch.float64)[None]
ADVANTAGES = torch.tensor([-2.0, -0.3, 0.0, 0.7, 3.0], dtype=torch.float64)[:, None]


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.1, 0.4), (0.9, 0.05)])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_surrogate_and_its_gradient_equal_the_scalar_oracle(low, high, as_tensor):
    log_ratio = RATIOS.expand(5, -1).clone().requires_grad_()
    edges = [torch.full((5, 1), edge, dtype=torch.float64) if as_tensor else edge for edge in (low, high)]
    loss = clipped_surrogate(log_ratio, ADVANTAGES, *edges)
    (gradient,) = torch.autograd.grad(loss.sum(), log_ratio)
    oracle = torch.tensor(
        [
            [scalar_grpo.surrogate(ratio, advantage, low, high) for ratio in RATIOS[0].tolist()]
            for advantage in ADVANTAGES[:, 0].tolist()
        ],
        dtype=torch.float64,
    )
    torch.testing.assert_close(loss.detach(), oracle[..., 0])
    torch.testing.assert_close(gradient, oracle[..., 1])
    cut = outside_clip(log_ratio.detach(), ADVANTAGES, *edges)
    teaches = ADVANTAGES.expand(-1, 41) != 0
    assert torch.equal(cut, (gradient == 0) & teaches)
    assert cut.any()


def test_every_row_clips_at_its_own_place():
    log_ratio = torch.full((3, 2), 0.25)
    clip = torch.tensor([[0.1], [0.2], [0.5]])
    own = clipped_surrogate(log_ratio, torch.ones(3, 1), clip, clip)
    one_by_one = [clipped_surrogate(log_ratio[:1], torch.ones(1, 1), float(c), float(c)) for c in clip]
    assert torch.equal(own, torch.cat(one_by_one))
    assert own[:, 0].unique().numel() == 3


@pytest.mark.parametrize("seed", range(3))
def test_the_expectation_of_k3_is_the_kl_divergence_and_of_its_score_gradient_the_kls_gradient(seed):
    """Sum over all three actions of a policy: no sampling, so both identities hold exactly."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, dtype=torch.float64, generator=random).requires_grad_()
    reference = torch.randn(3, dtype=torch.float64, generator=random).log_softmax(0)
    policy = logits.log_softmax(0)
    kl = (policy.exp() * (policy - reference)).sum()
    expectation = (policy.exp() * kl_k3(policy, reference)).sum()
    torch.testing.assert_close(expectation, kl)
    (gradient_of_expectation,) = torch.autograd.grad(expectation, logits, retain_graph=True)
    (gradient_of_kl,) = torch.autograd.grad(kl, logits)
    torch.testing.assert_close(gradient_of_expectation, gradient_of_kl)


@given(st.floats(-12, 0), st.floats(-12, 0))
def test_k3_is_never_negative_and_zero_only_at_equality(log_prob, ref_log_prob):
    value = kl_k3(torch.tensor([[log_prob]]).double(), torch.tensor([[ref_log_prob]]).double())
    assert float(value) >= -1e-12
    if abs(log_prob - ref_log_prob) > 1e-3:
        assert float(value) > 0


def test_k3_stays_finite_when_the_policies_lie_worlds_apart():
    log_probs = torch.tensor([[-500.0, 0.0]], requires_grad=True)
    value = kl_k3(log_probs, torch.tensor([[0.0, -500.0]]))
    value.sum().backward()
    assert bool(value.isfinite().all())
    assert bool(log_probs.grad.isfinite().all())


MASK = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
MEMBERS = torch.tensor([3, 3, 0, 0, 3])


def test_per_completion_weights_by_hand():
    expected = torch.tensor([[1 / 12] * 4, [1 / 6, 0, 1 / 6, 0], [1 / 2, 0, 0, 0], [1 / 4, 1 / 4, 0, 0], [0, 0, 0, 0]])
    torch.testing.assert_close(action_weights(MASK, MEMBERS, per_token=False), expected)


def test_per_token_weights_by_hand():
    expected = torch.where(MASK, torch.tensor([1 / 6, 1 / 6, 1 / 3, 1 / 3, 1 / 6])[:, None], 0.0)
    torch.testing.assert_close(action_weights(MASK, MEMBERS, per_token=True), expected)


@pytest.mark.parametrize("per_token", [False, True])
def test_weights_sum_to_one_for_every_member_and_no_neighbour_matters(per_token):
    mask = torch.rand(12, 5, generator=torch.Generator().manual_seed(0)) < 0.6
    mask[:, 0] = True
    members = torch.tensor([0, 1, 2] * 4)
    weights = action_weights(mask, members, per_token=per_token)
    for member in range(3):
        mine = members == member
        assert float(weights[mine].sum()) == pytest.approx(1.0)
        assert torch.equal(weights[mine], action_weights(mask[mine], members[mine], per_token=per_token))


def test_a_batch_without_actions_weighs_nothing():
    for per_token in (False, True):
        weights = action_weights(torch.zeros(3, 2, dtype=torch.bool), torch.tensor([0, 0, 1]), per_token=per_token)
        assert torch.equal(weights, torch.zeros(3, 2))
