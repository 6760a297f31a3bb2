"""Advantages of single actions: by hand on ragged groups, against slow references."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evogrpo.functional.advantages import (
    advantages,
    group_advantages,
    group_return_advantages,
    returns_to_go,
    standardised_step_rewards,
    timestep_return_advantages,
)
from tests.oracles import slow_advantages

NAN = float("nan")
KINDS = ("process", "return_to_go_group", "return_to_go_timestep")
EPISODES = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.integers(-3, 3), min_size=1, max_size=7)),
    min_size=2,
    max_size=8,
).filter(lambda rows: all([g for g, _ in rows].count(g) > 1 for g, _ in rows))


def padded(episodes, value=NAN):
    """Return step rewards and mask of ragged episodes."""
    width = max(map(len, episodes)) + 1
    steps = torch.tensor([[*map(float, row)] + [value] * (width - len(row)) for row in episodes])
    return steps, torch.arange(width) < torch.tensor([len(row) for row in episodes])[:, None]


@given(EPISODES, st.floats(0, 1))
def test_returns_to_go_match_slow_reference(rows, gamma):
    episodes = [row for _, row in rows]
    steps, mask = padded(episodes, value=99.0)
    actual = returns_to_go(steps, mask, gamma)
    for row, episode in enumerate(episodes):
        expected = torch.tensor(slow_advantages.returns_to_go(episode, gamma))
        torch.testing.assert_close(actual[row, : len(episode)], expected, rtol=1e-6, atol=1e-6)
        assert not bool(actual[row, len(episode) :].any())


def test_each_row_has_its_own_discount_on_long_episodes():
    gamma = torch.tensor([[1.0], [0.5], [0.0]])
    actual = returns_to_go(torch.ones(3, 1000), torch.ones(3, 1000, dtype=torch.bool), gamma)
    assert torch.equal(actual[0], torch.arange(1000, 0, -1).float())
    torch.testing.assert_close(actual[1], 2 - 0.5 ** torch.arange(999, -1, -1).float())
    assert torch.equal(actual[2], torch.ones(1000))


def test_tokens_between_actions_are_not_discounted():
    mask = torch.tensor([[True, False, False, True, True]])
    steps = torch.tensor([[1.0, 50.0, NAN, 4.0, 8.0]])
    expected = torch.tensor([[1 + 2 + 2, 0.0, 0.0, 4 + 4, 8.0]])
    torch.testing.assert_close(returns_to_go(steps, mask, 0.5), expected)


@given(EPISODES, st.sampled_from(KINDS), st.sampled_from([1.0, 0.9, 0.5]))
def test_estimators_match_slow_reference(rows, kind, gamma):
    groups = [group for group, _ in rows]
    episodes = [row for _, row in rows]
    steps, mask = padded(episodes)
    numbers = torch.tensor(groups)
    actual = advantages(
        kind,
        rewards=steps.nansum(1),
        step_rewards=steps,
        group_ids=numbers,
        member_ids=torch.zeros_like(numbers),
        mask=mask,
        gamma=gamma,
        eps=0.01,
    )
    expected = slow_advantages.of_actions(kind, episodes, groups, gamma, 0.01)
    for row, values in enumerate(expected):
        torch.testing.assert_close(
            actual[row, : len(values)], torch.tensor(values), rtol=1e-4, atol=1e-5
        )
    assert not bool(actual[~mask].any())


BY_HAND = {
    # Mean 2, deviation sqrt(2.5).
    "process": (
        [[0, 1, 2], [3, 4]],
        [[-3 / 2.5**0.5, -1 / 2.5**0.5, 0], [3 / 2.5**0.5, 2 / 2.5**0.5]],
    ),
    # Returns 2, 1 and 0: mean 1, deviation 1.
    "return_to_go_group": ([[1, 1], [0]], [[1, 0], [-1]]),
    # Returns: 3 2 1 | 1 - - | 2 1 -; the ended episodes count as 0 in their columns.
    "return_to_go_timestep": ([[1, 1, 1], [1], [1, 1]], [[1, 1, 2 / 3**0.5], [-1], [0, 0]]),
}


@pytest.mark.parametrize("reward", [1.0, -1.0, 0.1])
def test_equal_step_rewards_give_exactly_zero_in_process(reward):
    """As in CartPole and MountainCar, where the length of an episode is its reward."""
    steps, mask = padded([[reward] * 8, [reward] * 3, [reward] * 5])
    group = torch.zeros(3, dtype=torch.long)
    assert not bool(standardised_step_rewards(steps, mask, group, 1e-8)[mask].any())


def test_truncated_perfect_episode_ends_below_the_mean_with_group_returns_only():
    steps, mask = padded([[1] * 10, [1] * 4, [1] * 4])
    group = torch.zeros(3, dtype=torch.long)
    assert float(group_return_advantages(steps, mask, group)[0, 9]) < 0
    assert bool((timestep_return_advantages(steps, mask, group)[0, :10] > 0).all())


def test_process_equals_outcome_with_one_reward_at_the_end():
    """NaN is left out of the group's mean, unlike 0."""
    rewards = torch.tensor([1.0, 0.0, 0.5, 1.0])
    group = torch.tensor([0, 0, 1, 1])
    mask = torch.arange(5) < torch.tensor([2, 5, 1, 3])[:, None]
    options = {"rewards": rewards, "group_ids": group, "member_ids": group, "mask": mask}
    expected = torch.where(mask, group_advantages(rewards, group)[:, None], 0.0)
    torch.testing.assert_close(advantages("process", **options), expected)
    torch.testing.assert_close(advantages("outcome", **options), expected)
    steps = torch.where(mask, 0.0, NAN)
    steps[torch.arange(4), mask.sum(1) - 1] = rewards
    assert (
        float((advantages("process", step_rewards=steps, **options) - expected).abs().max()) > 0.1
    )


@pytest.mark.parametrize("kind", KINDS)
def test_episodes_without_reward_are_left_out_of_statistics(kind):
    steps, mask = padded([[1, 2], [5], [0, 0, 0]])
    steps[2] = NAN
    group = torch.zeros(3, dtype=torch.long)
    work = {
        "rewards": steps[:, 0],
        "step_rewards": steps,
        "group_ids": group,
        "member_ids": group,
        "mask": mask,
    }
    actual = advantages(kind, gamma=0.9, eps=0.01, **work)
    alone = advantages(
        kind, gamma=0.9, eps=0.01, **{name: values[:2] for name, values in work.items()}
    )
    assert torch.equal(actual[:2], alone)
    assert not bool(actual[2].any())
