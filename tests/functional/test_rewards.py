"""Transformations of rewards: by hand, against the whole history, and at their limits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evogrpo.functional.advantages import subtract_kl
from evogrpo.functional.loss_types import REWARD_NORMS
from evogrpo.functional.rewards import (
    difficulty_mask,
    normalise_rewards,
    overlong_penalty,
    place_on_last_action,
    update_running_statistics,
)

NAN = float("nan")
REWARDS = torch.tensor([1.0, 3.0, NAN, 5.0, 9.0, -2.0])
GROUPS = torch.tensor([0, 0, 0, 1, 1, 2])
MEMBERS = torch.tensor([0, 0, 0, 0, 0, 1])
NOTHING = torch.zeros(2, 3, dtype=torch.float64)


def normalised(rewards, norm, **options):
    if norm == "running":
        running = update_running_statistics(NOTHING, rewards, MEMBERS)
    else:
        running = None
    return normalise_rewards(
        rewards, norm, group_ids=GROUPS, member_ids=MEMBERS, running=running, **options
    )


@pytest.mark.parametrize(
    ("low", "high", "kept"),
    [
        (None, None, [True, True, True]),
        (2.0, None, [False, True, False]),  # the means are 2, 7 and -2; on a bound is out
        (None, 7.0, [True, False, True]),
        (-2.5, 2.5, [True, False, True]),
    ],
)
def test_difficulty_mask_keeps_groups_within_the_bounds(low, high, kept):
    inside = difficulty_mask(REWARDS, GROUPS, low, high)
    assert inside.tolist() == [kept[group] for group in GROUPS.tolist()]
    unrewarded = difficulty_mask(torch.full((2,), NAN), torch.zeros(2, dtype=torch.long), 1.0, 2.0)
    assert unrewarded.all()


def test_group_norm_by_hand():
    root = 2**0.5
    expected = torch.tensor([-1 / root, 1 / root, NAN, -1 / root, 1 / root, 0.0])
    torch.testing.assert_close(normalised(REWARDS, "group", eps=0.0), expected, equal_nan=True)
    shifted = torch.tensor([-1.0, 1.0, NAN, -2.0, 2.0, 0.0])
    torch.testing.assert_close(normalised(REWARDS, "group", shift=True), shifted, equal_nan=True)
    scaled = torch.tensor([1 / root, 3 / root, NAN, 5 / (2 * root), 9 / (2 * root), -2.0])
    torch.testing.assert_close(
        normalised(REWARDS, "group", scale=True, eps=0.0), scaled, equal_nan=True
    )


@pytest.mark.parametrize("norm", ["batch", "running"])
def test_batch_and_running_norm_by_hand(norm):
    """Running statistics without history are those of the batch."""
    values = torch.tensor([1.0, 3.0, 5.0, 9.0])
    expected = torch.full((6,), NAN)
    expected[[0, 1, 3, 4]] = (values - values.mean()) / (values.std() + 0.5)
    expected[5] = 0.0
    torch.testing.assert_close(normalised(REWARDS, norm, eps=0.5), expected, equal_nan=True)


@pytest.mark.parametrize("norm", REWARD_NORMS)
@pytest.mark.parametrize("value", [0.1, -3.7])
def test_equal_rewards_become_exactly_zero(norm, value):
    rewards = torch.full((6,), value)
    assert not bool(normalised(rewards, norm, eps=1e-8).any())
    assert not bool(normalised(rewards, norm, shift=True).any())
    assert torch.equal(normalised(rewards, norm, scale=True, eps=1e-8), rewards)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.floats(-100, 100)), min_size=1, max_size=40),
    st.integers(1, 7),
)
def test_running_statistics_do_not_depend_on_the_chunks(history, chunk):
    members = torch.tensor([member for member, _ in history])
    rewards = torch.tensor([reward for _, reward in history], dtype=torch.float64)
    rewards[::6] = NAN
    running = torch.zeros(3, 3, dtype=torch.float64)
    for part in torch.arange(len(history)).split(chunk):
        running = update_running_statistics(running, rewards[part], members[part])
    for member in range(3):
        values = rewards[(members == member) & ~rewards.isnan()]
        assert float(running[member, 0]) == len(values)
        if len(values):
            torch.testing.assert_close(running[member, 1], values.mean())
            torch.testing.assert_close(
                running[member, 2], ((values - values.mean()) ** 2).sum(), rtol=1e-7, atol=1e-8
            )


def test_overlong_penalty_by_hand():
    lengths = torch.tensor([0, 5, 6, 7, 9, 10, 50])
    expected = torch.tensor([0.0, 0.0, 0.0, -0.25, -0.75, -1.0, -1.0])
    torch.testing.assert_close(overlong_penalty(lengths, 10, 4), expected)


@pytest.mark.parametrize("buffer", [0, -1, 11])
def test_invalid_overlong_buffer_is_rejected(buffer):
    with pytest.raises(ValueError, match="overlong_buffer"):
        overlong_penalty(torch.tensor([1]), 10, buffer)


MASK = torch.tensor(
    [[True, True, False, True, False], [True, False, False, False, False], [False] * 5]
)


def test_rewards_are_placed_on_the_last_action():
    expected = torch.full((3, 5), NAN)
    expected[0, 3] = 7.0
    expected[1, 0] = 8.0
    actual = place_on_last_action(torch.tensor([7.0, 8.0, 9.0]), MASK)
    torch.testing.assert_close(actual, expected, equal_nan=True)


def test_kl_is_subtracted_from_counted_actions_of_rows_with_reward():
    placed = place_on_last_action(torch.tensor([7.0, NAN, 9.0]), MASK)
    expected = torch.full((3, 5), NAN)
    expected[0, [0, 1, 3]] = torch.tensor([-0.5, -0.5, 6.5])
    actual = subtract_kl(placed, torch.full((3, 5), 0.5), MASK)
    torch.testing.assert_close(actual, expected, equal_nan=True)
