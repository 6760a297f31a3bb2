"""Advantages of completions: by hand, against a slow reference, and their symmetries."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evogrpo.functional.advantages import (
    advantages,
    batch_std_advantages,
    gdpo_advantages,
    group_advantages,
    leave_one_out_advantages,
    mean_centred_advantages,
)
from evogrpo.functional.rewards import zero_variance_groups
from tests.oracles import scalar_grpo, slow_advantages

NAN = float("nan")
GROUPS = st.lists(st.lists(st.integers(-8, 8), min_size=2, max_size=6), min_size=1, max_size=4)


def tensors(groups):
    """Return rewards and group numbers of ragged groups, interleaved."""
    rounds = range(max(len(group) for group in groups))
    pairs = [(group[turn], number) for turn in rounds for number, group in enumerate(groups) if turn < len(group)]
    rewards, numbers = (list(column) for column in zip(*pairs, strict=True))
    return torch.tensor(rewards, dtype=torch.float32), torch.tensor(numbers)


def test_ragged_groups_in_any_order_by_hand():
    # Group 7: rewards 1, 2, 3: mean 2, sample deviation 1. Group 4: 0, 4: mean 2, deviation sqrt(8).
    rewards = torch.tensor([1.0, 0.0, 2.0, 4.0, 3.0])
    groups = torch.tensor([7, 4, 7, 4, 7])
    eps = 0.5
    root = math.sqrt(8)
    expected = torch.tensor([-1 / 1.5, -2 / (root + eps), 0.0, 2 / (root + eps), 1 / 1.5])
    torch.testing.assert_close(group_advantages(rewards, groups, eps), expected)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -3.7, 1e8, 1e-30])
@pytest.mark.parametrize("size", [2, 3, 7, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_advantages_of_exactly_zero(value, size, dtype):
    rewards = torch.full((2 * size,), value, dtype=dtype)
    found = group_advantages(rewards, torch.arange(2 * size) // size, eps=1e-8)
    assert torch.equal(found, torch.zeros(2 * size, dtype=dtype))


def test_nan_rewards_are_left_out():
    rewards = torch.tensor([1.0, NAN, 3.0, NAN, 5.0, NAN, NAN])
    groups = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    found = group_advantages(rewards, groups)
    torch.testing.assert_close(
        found[[0, 2]], group_advantages(torch.tensor([1.0, 3.0]), torch.tensor([0, 0])), rtol=0, atol=0
    )
    assert torch.equal(found[[1, 3, 4, 5, 6]], torch.zeros(5))


def test_groups_of_one_are_rejected():
    with pytest.raises(ValueError, match=r"group.*\[5\]"):
        group_advantages(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4, 4, 5]))


def test_empty_input_gives_empty_output():
    assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0,)


@given(GROUPS, st.floats(1e-6, 1.0))
def test_group_advantages_match_scalar_reference(dealt, eps):
    rewards, groups = tensors(dealt)
    rewards[::5] = NAN
    expected = torch.tensor(scalar_grpo.advantages(rewards.tolist(), groups.tolist(), eps))
    torch.testing.assert_close(group_advantages(rewards, groups, eps), expected, rtol=1e-5, atol=1e-6)


@given(GROUPS, st.integers(-100, 100))
def test_invariant_to_shift_of_a_groups_rewards(dealt, shift):
    rewards, groups = tensors(dealt)
    moved = rewards + shift * (groups + 1)
    torch.testing.assert_close(group_advantages(moved, groups), group_advantages(rewards, groups), rtol=1e-5, atol=1e-5)


@given(GROUPS, st.floats(0.25, 4.0))
def test_invariant_to_scale_if_eps_scales_too(dealt, scale):
    rewards, groups = tensors(dealt)
    scaled = group_advantages(rewards * scale, groups, eps=0.1 * scale)
    torch.testing.assert_close(scaled, group_advantages(rewards, groups, eps=0.1), rtol=1e-4, atol=1e-5)


@given(GROUPS)
def test_sum_to_zero_and_keep_order_within_each_group(dealt):
    rewards, groups = tensors(dealt)
    found = group_advantages(rewards, groups)
    for group in groups.unique():
        rows = groups == group
        assert abs(float(found[rows].sum())) < 1e-4
        order = rewards[rows].argsort(stable=True)
        assert bool((found[rows][order].diff() >= 0).all())


@given(GROUPS, st.randoms(use_true_random=False))
def test_invariant_to_row_order_and_group_ids(dealt, random):
    rewards, groups = tensors(dealt)
    order = list(range(len(rewards)))
    random.shuffle(order)
    again = group_advantages(rewards[order], 1000 - 7 * groups[order])
    torch.testing.assert_close(again, group_advantages(rewards, groups)[order], rtol=1e-6, atol=1e-6)


def test_large_rewards_with_small_differences():
    rewards = torch.tensor([1e7, 1e7 + 1, 1e7 + 2])
    torch.testing.assert_close(
        group_advantages(rewards, torch.zeros(3, dtype=torch.long)),
        torch.tensor([-1.0, 0.0, 1.0]),
        rtol=1e-3,
        atol=1e-6,
    )


def test_zero_variance_groups():
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.0, 1.0, NAN, 2.0, NAN, NAN])
    groups = torch.tensor([0, 0, 0, 1, 1, 2, 2, 3, 3])
    assert zero_variance_groups(rewards, groups, 4).tolist() == [True, False, True, True]


def of_kind(kind, rewards, groups, members, eps=1e-4):
    """Return the advantages of the named estimator."""
    if kind == "outcome":
        return group_advantages(rewards, groups, eps)
    if kind == "batch_std":
        return batch_std_advantages(rewards, groups, members, eps)
    if kind == "gdpo":
        return gdpo_advantages(rewards[:, None], None, groups, members, eps)
    if kind == "reinforce":
        rows = torch.ones(len(rewards), 1, dtype=torch.bool)
        return advantages(kind, rewards=rewards, group_ids=groups, member_ids=members, mask=rows)[:, 0]
    return {"mean_only": mean_centred_advantages, "rloo": leave_one_out_advantages}[kind](rewards, groups)


KINDS = ("outcome", "mean_only", "rloo", "batch_std", "gdpo")


@given(GROUPS, st.sampled_from([*KINDS[:-1], "reinforce"]), st.booleans())
def test_estimators_match_slow_reference(dealt, kind, holes):
    rewards, groups = tensors(dealt)
    if holes:
        rewards[::3] = NAN
    members = groups % 2
    expected = slow_advantages.of_completions(kind, rewards.tolist(), groups.tolist(), members.tolist(), 0.01)
    actual = of_kind(kind, rewards, groups, members, 0.01)
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [0.1, -3.7, 1e8])
def test_equal_rewards_give_exactly_zero_beside_other_groups(kind, value):
    rewards = torch.tensor([value] * 8 + [1.0, 2.0, 3.0, NAN])
    groups = torch.arange(12) // 8
    found = of_kind(kind, rewards, groups, torch.zeros(12, dtype=torch.long), 1e-8)
    assert torch.equal(found[:8], torch.zeros(8))
    assert float(found[8:].abs().max()) > 0
    assert float(found[11]) == 0


def test_leave_one_out_by_hand():
    rewards = torch.tensor([1.0, 2.0, 6.0, NAN])
    found = leave_one_out_advantages(rewards, torch.zeros(4, dtype=torch.long))
    torch.testing.assert_close(found, torch.tensor([1 - 8 / 2, 2 - 7 / 2, 6 - 3 / 2, 0.0]))
    three = (
        mean_centred_advantages(rewards, torch.zeros(4, dtype=torch.long)) * 3 / 2
    )  # g / (g - 1) of the three that apply
    torch.testing.assert_close(found, three)


def test_batch_std_uses_all_rewards_of_one_member():
    rewards = torch.tensor([0.0, 2.0, 10.0, 12.0, 500.0, -500.0])
    groups, members = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([0, 0, 0, 0, 1, 1])
    deviation = torch.tensor([0.0, 2.0, 10.0, 12.0]).std()
    expected = torch.tensor([-1.0, 1.0, -1.0, 1.0]) / (deviation + 0.5)
    torch.testing.assert_close(batch_std_advantages(rewards, groups, members, 0.5)[:4], expected)


@given(GROUPS, st.integers(1, 3), st.integers(0, 1000))
def test_gdpo_matches_slow_reference(dealt, functions, seed):
    rewards, groups = tensors(dealt)
    random = torch.Generator().manual_seed(seed)
    components = torch.randint(-3, 4, (len(rewards), functions), generator=random).float()
    components[:, 0] = rewards
    components[torch.rand(components.shape, generator=random) < 0.2] = NAN
    weights = 0.5 + torch.rand(functions, generator=random)
    members = groups % 2
    expected = slow_advantages.gdpo(components.tolist(), weights.tolist(), groups.tolist(), members.tolist(), 0.01)
    actual = gdpo_advantages(components, weights, groups, members, 0.01)
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-4, atol=1e-5)


def test_gdpo_is_invariant_to_the_range_of_a_reward_function():
    components = torch.tensor([[0.0, 0.0], [0.0, 1000.0], [1.0, 0.0], [1.0, 1000.0]])
    groups = torch.zeros(4, dtype=torch.long)
    found = gdpo_advantages(components, None, groups, groups)
    torch.testing.assert_close(found[1], found[2], rtol=0, atol=1e-3)
    summed = group_advantages(components.sum(1), groups)
    assert float(summed[1] - summed[2]) > 1.0
    only_first = gdpo_advantages(components, torch.tensor([1.0, 0.0]), groups, groups)
    torch.testing.assert_close(only_first[:2], only_first[:1].expand(2))
