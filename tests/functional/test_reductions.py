"""Loss weights: by hand, against slow references, and their invariances."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evogrpo.functional.losses import (
    AGGREGATIONS,
    LOSS_TYPES,
    loss_weights,
    policy_loss,
)
from tests.functional.test_losses import random_batch
from tests.oracles import slow_losses

MASK = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
MEMBERS = torch.tensor([3, 3, 0, 0, 3])  # member 3: actions 4 + 2 + 0; member 0: 1 + 2
BY_HAND = {
    "token-mean": [1 / 6, 1 / 6, 1 / 3, 1 / 3, 0],
    "seq-mean-token-sum": [1 / 3, 1 / 3, 1 / 2, 1 / 2, 0],
    "seq-mean-token-mean": [1 / 12, 1 / 6, 1 / 2, 1 / 4, 0],
    "seq-mean-token-sum-norm": [1 / 30, 1 / 30, 1 / 20, 1 / 20, 0],
}
CLIPS = {"clip_low": 0.2, "clip_high": 0.3}
EVERY = [(loss_type, aggregation) for loss_type in LOSS_TYPES for aggregation in (None, *AGGREGATIONS)]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_weights_by_hand(aggregation):
    expected = torch.where(MASK, torch.tensor(BY_HAND[aggregation])[:, None], 0.0)
    torch.testing.assert_close(loss_weights("grpo", aggregation, MASK, MEMBERS, 10), expected)


def test_default_aggregation_of_loss_types():
    assert set(BY_HAND) == set(AGGREGATIONS)
    for loss_type in LOSS_TYPES:
        own = loss_weights(loss_type, None, MASK, MEMBERS, 10)
        assert torch.equal(own, loss_weights("grpo", LOSS_TYPES[loss_type].aggregation, MASK, MEMBERS, 10))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_weighted_sum_matches_slow_reference(loss_type, aggregation):
    for seed in range(4):
        new, old, advantages, mask = random_batch(seed)
        member = torch.tensor([0, 1, 1, 0, 1])
        losses = policy_loss(loss_type, new, old, advantages, mask, **CLIPS)
        total = (loss_weights(loss_type, aggregation, mask, member, 9) * losses).sum()

        def ragged(values, own, mask=mask):
            return [list(row[here]) for row, here in zip(values[own], mask[own], strict=True)]

        slow = sum(
            slow_losses.member_loss(
                loss_type,
                aggregation,
                ragged(new, member == number),
                ragged(old, member == number),
                ragged(advantages, member == number),
                max_completion_length=9,
                **CLIPS,
            )
            for number in (0, 1)
        )
        torch.testing.assert_close(total, slow, rtol=1e-5, atol=1e-9)
        (gradient,) = torch.autograd.grad(total, new)
        (expected,) = torch.autograd.grad(slow, new)
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("kind", EVERY)
@settings(max_examples=3)
@given(st.integers(0, 10_000), st.integers(1, 5))
def test_padding_has_no_weight_and_changes_none(kind, seed, extra):
    new, old, advantages, mask = random_batch(seed)
    member = torch.tensor([0, 0, 1, 1, 1])
    wide = torch.cat([mask, torch.zeros(5, extra, dtype=torch.bool)], 1)
    weights, wider = loss_weights(*kind, mask, member, 9), loss_weights(*kind, wide, member, 9)
    assert torch.equal(wider[:, : mask.shape[1]], weights)
    assert not bool(wider[:, mask.shape[1] :].any())
    assert not bool(weights[~mask].any())
    junk = torch.full((5, extra), 7.0, dtype=torch.float64)
    arguments = [torch.cat([values, junk], 1) for values in (new, old, advantages)]
    narrow = (weights * policy_loss(kind[0], new, old, advantages, mask, **CLIPS)).sum()
    padded = (wider * policy_loss(kind[0], *arguments, wide, **CLIPS)).sum()
    torch.testing.assert_close(padded, narrow, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("aggregation", [None, *AGGREGATIONS])
def test_repeated_rows_give_the_same_loss(loss_type, aggregation):
    member = torch.tensor([0, 0, 1, 1, 1])
    *_, mask = random_batch(0)
    once = loss_weights(loss_type, aggregation, mask, member, 9)
    twice = loss_weights(loss_type, aggregation, torch.cat([mask, mask]), torch.cat([member, member]), 9)
    torch.testing.assert_close(twice, torch.cat([once, once]) / 2)


@pytest.mark.parametrize("kind", EVERY)
@settings(max_examples=3)
@given(st.integers(0, 10_000))
def test_members_are_independent(kind, seed):
    *_, mask = random_batch(seed, rows=9)
    member = torch.tensor([0, 1, 2] * 3)
    weights = loss_weights(*kind, mask, member, 9)
    for number in range(3):
        own = member == number
        alone = loss_weights(*kind, mask[own], torch.zeros(3, dtype=torch.long), 9)
        assert torch.equal(weights[own], alone)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_rows_without_actions_weigh_nothing(loss_type):
    weights = loss_weights(loss_type, None, torch.zeros(3, 2, dtype=torch.bool), torch.tensor([0, 0, 1]), 9)
    assert torch.equal(weights, torch.zeros(3, 2))
    nothing = torch.zeros(0, 2, dtype=torch.bool)
    assert loss_weights(loss_type, None, nothing, torch.zeros(0, dtype=torch.long), 9).shape == (0, 2)


def test_invalid_arguments_are_rejected():
    with pytest.raises(ValueError, match="max_completion_length"):
        loss_weights("dr_grpo", None, MASK, MEMBERS)
    with pytest.raises(ValueError, match="aggregation"):
        loss_weights("grpo", "mean", MASK, MEMBERS)
    with pytest.raises(ValueError, match="loss_type"):
        loss_weights("ppo", "token-mean", MASK, MEMBERS)
