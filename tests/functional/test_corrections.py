"""Importance weights, effective sample size and high-entropy masks."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evogrpo.functional.loss_types import ACTION_KLS, IMPORTANCE_CORRECTIONS, LOSS_TYPES
from evogrpo.functional.losses import (
    ROUNDING,
    high_entropy_mask,
    importance_weights,
    kl_estimate,
    policy_loss,
)

RATIOS = torch.tensor([[1.5, 0.5, 3.0, 9.0], [1.6, 1.6, 1.0, 9.0]])
MASK = torch.tensor([[True, True, True, False], [True, True, False, False]])
OLD = torch.full((2, 4), -2.0)
BY_HAND = {
    "token_truncate": [[1.5, 0.5, 2.0, 1.0], [1.6, 1.6, 1.0, 1.0]],
    "token_mask": [[1.5, 0.5, 0.0, 1.0], [1.6, 1.6, 1.0, 1.0]],
    # The products over counted actions: 2.25 and 2.56.
    "sequence_truncate": [[2.0, 2.0, 2.0, 1.0], [2.0, 2.0, 1.0, 1.0]],
    "sequence_mask": [[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 1.0]],
}


@pytest.mark.parametrize("kind", IMPORTANCE_CORRECTIONS)
def test_importance_weights_by_hand(kind):
    sampler = OLD - RATIOS.log()
    torch.testing.assert_close(
        importance_weights(kind, OLD, sampler, MASK), torch.tensor(BY_HAND[kind])
    )
    free = importance_weights(kind, OLD, sampler, MASK, cap=100.0)
    product = torch.tensor([[2.25], [2.56]]).expand_as(MASK)
    expected = torch.where(MASK, RATIOS if kind.startswith("token") else product, 1.0)
    torch.testing.assert_close(free, expected)


@pytest.mark.parametrize("kind", IMPORTANCE_CORRECTIONS)
def test_equal_nan_and_padded_values_get_weights_of_one(kind):
    sampler = OLD.clone()
    sampler[0, 1] = math.nan
    sampler[0, 3] = -math.inf
    weights = importance_weights(kind, OLD.clone().requires_grad_(), sampler, MASK, cap=1.0)
    assert torch.equal(weights, torch.ones(2, 4))
    assert not weights.requires_grad
    assert bool(importance_weights(kind, OLD, OLD - 1000.0, MASK).isfinite().all())


@given(st.integers(0, 1000), st.floats(0.05, 0.95) | st.just(1.0))
def test_high_entropy_mask_keeps_the_quantile_of_each_member(seed, quantile):
    random = torch.Generator().manual_seed(seed)
    entropies = torch.rand(8, 6, generator=random)
    mask = torch.rand(8, 6, generator=random) < 0.7
    members = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2])
    entropies[members == 1] += 5.0  # another level: thresholds must not mix
    mask[7] = False
    kept = high_entropy_mask(entropies, mask, members, quantile)
    assert not bool(kept[~mask].any())
    for member in (0, 1):
        member_mask = mask & (members == member)[:, None]
        values = entropies[member_mask].double()
        least = values[values >= torch.quantile(values, 1 - quantile) - 1e-7].min()
        assert torch.equal(
            kept & member_mask, member_mask & (entropies >= least.float() - ROUNDING)
        )
        assert bool(kept[member_mask].any())


def test_entropies_equal_up_to_rounding_are_kept_together():
    """Completions of one prompt have equal entropies at first, up to rounding."""
    entropies = torch.tensor([[1.0, 3.0], [1.0, 0.5], [1.0, 0.2]])
    rounded = entropies * (1 + 1e-6 * torch.tensor([[0.0, 1.0], [-1.0, 0.0], [1.0, -1.0]]))
    mask = torch.ones(3, 2, dtype=torch.bool)
    members = torch.zeros(3, dtype=torch.long)
    for share in (0.2, 0.3, 0.5, 0.7, 1.0):
        kept = high_entropy_mask(rounded, mask, members, share)
        assert torch.equal(kept, high_entropy_mask(entropies, mask, members, share))
        assert len(set(kept[:, 0].tolist())) == 1


# ---- where two policies agree, rounding must not decide anything

SHAPE = (16, 4)
ZEROS = torch.zeros(SHAPE)
EVERY_ACTION = torch.ones(SHAPE, dtype=torch.bool)
NOISE = 1e-6 * torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))
VALUES = torch.tensor([1.0, -1.0, 0.0, 2.0]).expand(SHAPE) + 0.1 * NOISE  # advantages


def gradient_of(loss_of, log_probs):
    log_probs = log_probs.clone().requires_grad_()
    loss_of(log_probs).sum().backward()
    return log_probs.grad


def assert_gradient_ignores_rounding(loss_of):
    exact = gradient_of(loss_of, ZEROS)
    for noise in (NOISE, -NOISE):
        torch.testing.assert_close(gradient_of(loss_of, noise), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ACTION_KLS)
def test_rounding_does_not_decide_the_gradient_of_a_kl(kind):
    assert_gradient_ignores_rounding(lambda log_probs: kl_estimate(kind, log_probs, ZEROS))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_rounding_does_not_decide_the_gradient_of_a_loss(loss_type):
    options = {"dual_clip": 2.0} if LOSS_TYPES[loss_type].bounded else {}
    clips = {"clip_low": 0.2, "clip_high": 0.3}
    assert_gradient_ignores_rounding(
        lambda log_probs: policy_loss(
            loss_type, log_probs, ZEROS, VALUES, EVERY_ACTION, **clips, **options
        )
    )


@pytest.mark.parametrize("kind", IMPORTANCE_CORRECTIONS)
def test_rounding_does_not_decide_an_importance_weight(kind):
    weights = importance_weights(kind, NOISE, ZEROS, EVERY_ACTION, cap=1.01)
    torch.testing.assert_close(weights, torch.ones(SHAPE), rtol=1e-4, atol=1e-5)


def test_the_gradient_of_abs_is_the_sign_beyond_rounding():
    difference = torch.tensor([-0.5, -2 * ROUNDING, 2 * ROUNDING, 3.0])
    kl = kl_estimate("abs", difference, torch.zeros(4))
    assert torch.equal(kl, difference.abs())
    gradient = gradient_of(lambda values: kl_estimate("abs", values, torch.zeros(4)), difference)
    assert torch.equal(gradient, difference.sign())
