"""Policy losses and their weights against a slow reference and closed forms.

Effects of masks and clips.
"""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evogrpo.functional.loss_types import AGGREGATIONS, LOSS_TYPES
from evogrpo.functional.losses import clipped_actions, loss_weights, policy_loss
from tests.oracles import slow_losses

RATIO_TYPES = ("grpo", "dapo", "bnpo", "dr_grpo", "gspo", "luspo")
OPTIONS = [
    (loss_type, options)
    for loss_type, options in itertools.product(
        LOSS_TYPES,
        (
            {},
            {"dual_clip": 1.5},
            {"delta": 1.6},
            {"cispo_clip_low": True},
            {"sapo_tau_positive": 2.0, "sapo_tau_negative": 0.5},
        ),
    )
    if loss_type in RATIO_TYPES or not {"dual_clip", "delta"} & set(options)
]


def random_batch(seed, rows=5, width=6, spread=0.5):
    """Return log-probs with gradient, old ones, advantages of every sign, and a ragged mask."""
    random = torch.Generator().manual_seed(seed)
    old = -2 + torch.randn(rows, width, generator=random, dtype=torch.float64)
    new = (
        old + spread * torch.randn(rows, width, generator=random, dtype=torch.float64)
    ).requires_grad_()
    advantages = torch.randn(rows, width, generator=random, dtype=torch.float64)
    advantages[torch.rand(rows, width, generator=random) < 0.1] = 0.0
    return new, old, advantages, torch.rand(rows, width, generator=random) < 0.7


@pytest.mark.parametrize(("loss_type", "options"), OPTIONS)
def test_losses_and_gradients_match_slow_reference(loss_type, options):
    low = torch.tensor([0.2, 0.1, 0.5, 0.2, 0.1])
    high = torch.tensor([0.2, 0.3, 0.1, 0.1, 0.5])
    clips = {"clip_low": low.double()[:, None], "clip_high": high.double()[:, None]}
    for seed in range(6):
        new, old, advantages, mask = random_batch(seed)
        losses = policy_loss(loss_type, new, old, advantages, mask, **clips, **options)
        slow = torch.zeros_like(losses)
        for row in range(len(mask)):
            if mask[row].any():
                counted = mask[row]
                values = slow_losses.completion_losses(
                    loss_type,
                    list(new[row, counted]),
                    old[row, counted].tolist(),
                    advantages[row, counted].tolist(),
                    clip_low=float(low.double()[row]),
                    clip_high=float(high.double()[row]),
                    **options,
                )
                slow[row, counted] = torch.stack(values)
        torch.testing.assert_close(losses, slow, rtol=1e-9, atol=1e-12)
        # Any weighting: a wrong gradient of one action cannot hide behind that of another.
        weights = torch.rand(
            mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
        )
        (gradient,) = torch.autograd.grad((weights * losses).sum(), new)
        (expected,) = torch.autograd.grad((weights * slow).sum(), new)
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_padding_affects_neither_loss_nor_gradient(loss_type):
    clean = random_batch(2)
    mask = clean[3]
    expected = policy_loss(loss_type, *clean, clip_low=0.2, clip_high=0.2)
    (slope,) = torch.autograd.grad(expected.sum(), clean[0])
    for rubbish, argument in itertools.product((math.nan, math.inf, -math.inf, 1e30), range(3)):
        dirty = [values.detach().clone() for values in clean]
        dirty[argument][~mask] = rubbish
        dirty[0].requires_grad_()
        losses = policy_loss(loss_type, *dirty, clip_low=0.2, clip_high=0.2)
        assert torch.equal(losses, expected)
        (gradient,) = torch.autograd.grad(losses.sum(), dirty[0])
        assert torch.equal(gradient, slope)
        sides = clipped_actions(loss_type, *dirty, clip_low=0.2, clip_high=0.2)
        assert torch.equal(
            torch.stack(sides),
            torch.stack(clipped_actions(loss_type, *clean, clip_low=0.2, clip_high=0.2)),
        )


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_extreme_ratios_have_finite_gradients(loss_type):
    new = torch.tensor([[-1.0, -2000.0], [-1.0, -3.0]], requires_grad=True)
    old = torch.tensor([[-1500.0, -1.0], [-1.0, -1.0]])
    mask = torch.ones(2, 2, dtype=torch.bool)
    for sign in (1.0, -1.0):
        losses = policy_loss(
            loss_type, new, old, torch.full((2, 1), sign), mask, clip_low=0.2, clip_high=0.2
        )
        (gradient,) = torch.autograd.grad(losses.sum(), new)
        assert bool(losses.isfinite().all())
        assert bool(gradient.isfinite().all())


@given(
    st.integers(0, 1000),
    st.sampled_from(("grpo", "dapo", "bnpo", "dr_grpo", "gmpo", "gspo", "luspo")),
)
def test_clipped_actions_have_no_gradient(seed, loss_type):
    new, old, advantages, mask = random_batch(seed)
    if loss_type in ("gspo", "luspo", "gmpo"):
        advantages = advantages[:, :1].expand_as(mask)
    bounds = torch.tensor([[0.1], [0.2], [0.5], [0.3], [0.1]], dtype=torch.float64)  # of each row
    clips = {"clip_low": bounds, "clip_high": bounds.flip(0)}
    low, high = clipped_actions(loss_type, new, old, advantages, mask, **clips)
    losses = policy_loss(loss_type, new, old, advantages, mask, **clips)
    (gradient,) = torch.autograd.grad(losses.sum(), new)
    assert torch.equal(low | high, mask & (advantages != 0) & (gradient == 0))
    assert not bool((low & high).any())
    assert bool((advantages[low] < 0).all())
    assert bool((advantages[high] > 0).all())


MASK = torch.tensor(
    [[1, 1, 1, 1], [1, 0, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool
)
MEMBERS = torch.tensor([3, 3, 0, 0, 3])  # member 3: actions 4 + 2 + 0; member 0: 1 + 2
BY_HAND = {
    "token-mean": [1 / 6, 1 / 6, 1 / 3, 1 / 3, 0],
    "seq-mean-token-sum": [1 / 3, 1 / 3, 1 / 2, 1 / 2, 0],
    "seq-mean-token-mean": [1 / 12, 1 / 6, 1 / 2, 1 / 4, 0],
    "seq-mean-token-sum-norm": [1 / 30, 1 / 30, 1 / 20, 1 / 20, 0],
}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_loss_weights_by_hand(aggregation):
    expected = torch.where(MASK, torch.tensor(BY_HAND[aggregation])[:, None], 0.0)
    torch.testing.assert_close(loss_weights("grpo", aggregation, MASK, MEMBERS, 10), expected)


def test_each_loss_type_has_its_default_aggregation():
    assert set(BY_HAND) == set(AGGREGATIONS)
    for loss_type in LOSS_TYPES:
        default = loss_weights(loss_type, None, MASK, MEMBERS, 10)
        assert torch.equal(
            default, loss_weights("grpo", LOSS_TYPES[loss_type].aggregation, MASK, MEMBERS, 10)
        )


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_rows_without_actions_weigh_nothing(loss_type):
    weights = loss_weights(
        loss_type, None, torch.zeros(3, 2, dtype=torch.bool), torch.tensor([0, 0, 1]), 9
    )
    assert torch.equal(weights, torch.zeros(3, 2))
    nothing = torch.zeros(0, 2, dtype=torch.bool)
    assert loss_weights(loss_type, None, nothing, torch.zeros(0, dtype=torch.long), 9).shape == (
        0,
        2,
    )
