"""Advantages: completions by hand and against a slow reference; order of operations.

Independence of members.
"""

import math
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evogrpo.functional.advantages import advantages
from evogrpo.functional.loss_types import ADVANTAGES, STEP_ADVANTAGES
from evogrpo.functional.rewards import zero_variance_groups
from tests.oracles import slow_advantages

NAN = float("nan")
KINDS = tuple(ADVANTAGES)
OF_COMPLETIONS = tuple(kind for kind in KINDS if kind not in STEP_ADVANTAGES)
GROUPS = st.lists(st.lists(st.integers(-8, 8), min_size=2, max_size=6), min_size=1, max_size=4)


def completion_advantages(kind, rewards, groups, members, **options):
    """Return one advantage per completion.

    `rewards` are `[n]` or, of several reward functions, `[n, f]`.
    """
    components = rewards if rewards.ndim == 2 else rewards[:, None]
    mask = torch.ones(len(rewards), 1, dtype=torch.bool)
    inputs = {"rewards": components[:, 0], "components": components, "mask": mask}
    return advantages(kind, group_ids=groups, member_ids=members, **inputs, **options)[:, 0]


def ragged(dealt):
    """Return rewards and group numbers of ragged groups, interleaved."""
    rewards = []
    numbers = []
    for turn in range(max(map(len, dealt))):
        for number, group in enumerate(dealt):
            if turn < len(group):
                rewards.append(group[turn])
                numbers.append(number)
    return torch.tensor(rewards, dtype=torch.float32), torch.tensor(numbers)


@given(GROUPS, st.sampled_from([kind for kind in OF_COMPLETIONS if kind != "gdpo"]), st.booleans())
def test_estimators_match_slow_reference(dealt, kind, holes):
    rewards, groups = ragged(dealt)
    if holes:
        rewards[::3] = NAN
    members = groups % 2
    expected = slow_advantages.of_completions(
        kind, rewards.tolist(), groups.tolist(), members.tolist(), 0.01
    )
    actual = completion_advantages(kind, rewards, groups, members, eps=0.01)
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-5, atol=1e-6)


@given(GROUPS, st.integers(1, 3), st.integers(0, 1000))
def test_gdpo_matches_slow_reference(dealt, functions, seed):
    rewards, groups = ragged(dealt)
    random = torch.Generator().manual_seed(seed)
    components = torch.randint(-3, 4, (len(rewards), functions), generator=random).float()
    components[:, 0] = rewards
    components[torch.rand(components.shape, generator=random) < 0.2] = NAN
    weights = 0.5 + torch.rand(functions, generator=random)
    members = groups % 2
    expected = slow_advantages.gdpo(
        components.tolist(), weights.tolist(), groups.tolist(), members.tolist(), 0.01
    )
    per_row = weights.expand_as(components)
    actual = completion_advantages(
        "gdpo", components, groups, members, component_weights=per_row, eps=0.01
    )
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [kind for kind in OF_COMPLETIONS if kind != "reinforce"])
@pytest.mark.parametrize("value", [0.1, -3.7, 1e8, 1e-30])
def test_equal_rewards_give_exactly_zero_beside_other_groups(kind, value):
    rewards = torch.tensor([value] * 8 + [1.0, 2.0, 3.0, NAN])
    groups = torch.arange(12) // 8
    found = completion_advantages(
        kind, rewards, groups, torch.zeros(12, dtype=torch.long), eps=1e-8
    )
    assert torch.equal(found[:8], torch.zeros(8))
    assert float(found[8:].abs().max()) > 0
    assert float(found[11]) == 0


def test_groups_of_equal_rewards_have_zero_variance():
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.0, 1.0, NAN, 2.0, NAN, NAN])
    groups = torch.tensor([0, 0, 0, 1, 1, 2, 2, 3, 3])
    assert zero_variance_groups(rewards, groups, 4).tolist() == [True, False, True, True]


def random_work(seed, members=2):
    """Return keyword arguments of `advantages`: 3 groups of 3 per member, some rewards missing."""
    random = torch.Generator().manual_seed(seed)
    rows = 9 * members
    mask = torch.arange(5) < torch.randint(1, 6, (rows, 1), generator=random)
    steps = torch.where(mask, torch.randint(-2, 3, (rows, 5), generator=random).float(), NAN)
    steps[torch.rand(rows, generator=random) < 0.2] = NAN
    rewards = torch.where(steps.isnan().all(1), NAN, steps.nansum(1))
    other = torch.where(rewards.isnan(), NAN, torch.rand(rows, generator=random))
    return {
        "rewards": rewards,
        "step_rewards": steps,
        "components": torch.stack([rewards, other], 1),
        "group_ids": torch.arange(rows) // 3,
        "member_ids": torch.arange(rows) // 9,
        "mask": mask,
    }


def select(work, rows):
    return {name: values[rows] for name, values in work.items()}


@pytest.mark.parametrize("kind", OF_COMPLETIONS)
def test_completion_estimators_are_constant_over_actions_and_discounted_by_gamma(kind):
    work = random_work(0)
    work["mask"][0] = torch.tensor([True, True, False, False, True])
    work["rewards"][0] = 5.0
    work["components"][0] = 5.0
    flat = advantages(kind, **work)
    per_row = flat.abs().amax(1, keepdim=True) * flat.sum(1, keepdim=True).sign()
    torch.testing.assert_close(flat, torch.where(work["mask"], per_row, 0.0))
    assert float(flat[0, 0]) != 0
    faded = advantages(kind, gamma=0.5, **work)
    torch.testing.assert_close(faded[0], flat[0] * torch.tensor([0.25, 0.5, 0.0, 0.0, 1.0]))


def test_operations_are_applied_in_the_documented_order():
    """Apply all steps in plain floats: normalise, clip, place, KL, clip, return, whiten, mask."""
    rewards = [0.0, 0.0, 0.0, 9.0]
    groups = [0, 0, 0, 0]
    gamma = 0.9
    lengths = [1, 3, 2, 3]
    penalties = [[0.3], [0.1, -0.2, 0.4], [0.0, 2.0], [0.1, 0.1, 0.1]]
    scores = slow_advantages.of_completions("outcome", rewards, groups, groups, 1e-4)
    assert max(scores) > 1.2  # so the first clip binds
    scores = [min(max(score, -1.2), 1.2) for score in scores]
    returns = []
    for score, length, penalty in zip(scores, lengths, penalties, strict=True):
        steps = [(score if step == length - 1 else 0.0) - penalty[step] for step in range(length)]
        returns.append(
            slow_advantages.returns_to_go([min(max(value, -1.2), 1.2) for value in steps], gamma)
        )
    all_returns = list(chain.from_iterable(returns))
    mean, deviation = slow_advantages.spread(all_returns)
    scale = math.sqrt(deviation**2 + 1e-8)
    expected = []
    for values in returns:
        expected.append([(value - mean) / scale for value in values])
    # The last clip binds.
    assert max(abs(value) for value in chain.from_iterable(expected)) > 1.3
    mask = torch.arange(3) < torch.tensor(lengths)[:, None]
    actual = advantages(
        "outcome",
        rewards=torch.tensor(rewards),
        group_ids=torch.tensor(groups),
        member_ids=torch.tensor(groups),
        mask=mask,
        gamma=gamma,
        kl_penalty=torch.tensor([row + [77.0] * (3 - len(row)) for row in penalties]),
        reward_clip=1.2,
        whiten_advantages=True,
        advantage_clip=1.3,
    )
    for row, values in enumerate(expected):
        clipped = torch.tensor([min(max(value, -1.3), 1.3) for value in values])
        torch.testing.assert_close(actual[row, : len(values)], clipped, rtol=1e-5, atol=1e-6)
    assert not bool(actual[~mask].any())


@pytest.mark.parametrize("kind", STEP_ADVANTAGES)
def test_kl_penalty_is_subtracted_before_the_return(kind):
    work = random_work(1)
    penalty = torch.rand(work["mask"].shape, generator=torch.Generator().manual_seed(2))
    actual = advantages(kind, kl_penalty=penalty, gamma=0.9, **work)
    if kind == "process":
        plain = advantages(kind, gamma=0.9, **work)
        rows = ~work["rewards"].isnan()
        returns = torch.tensor(
            [
                slow_advantages.returns_to_go(torch.where(m, p, 0.0).tolist(), 0.9)
                for m, p in zip(work["mask"], penalty, strict=True)
            ]
        )
        expected = torch.where(work["mask"] & rows[:, None], plain - returns, 0.0)
    else:
        steps = torch.where(
            work["rewards"].isnan()[:, None],
            NAN,
            work["step_rewards"].nan_to_num(nan=0.0) - penalty,
        )
        expected = advantages(kind, gamma=0.9, **work | {"step_rewards": steps})
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_completions_without_reward_get_zero_even_with_a_kl_penalty(kind):
    work = random_work(3)
    without = work["rewards"].isnan()
    assert bool(without.any())
    actual = advantages(kind, kl_penalty=torch.ones(work["mask"].shape), **work)
    assert not bool(actual[without].any())
    assert bool(actual.isfinite().all())


@pytest.mark.parametrize("kind", KINDS)
def test_whitening_is_over_the_actions_in_the_loss_that_have_a_reward(kind):
    work = random_work(3)
    in_loss = work["mask"].clone()
    in_loss[int((~work["rewards"].isnan()).nonzero()[0])] = False
    actual = advantages(kind, whiten_advantages=True, in_loss=in_loss, **work)
    plain = advantages(kind, **work)
    for member in range(2):
        used = in_loss & ((work["member_ids"] == member) & ~work["rewards"].isnan())[:, None]
        values = plain[used].double()
        expected = (values - values.mean()) / (values.var() + 1e-8).sqrt()
        torch.testing.assert_close(actual[used], expected.float(), rtol=1e-4, atol=1e-5)


@given(st.sampled_from(KINDS), st.integers(0, 500), st.booleans())
def test_members_are_independent(kind, seed, whitened):
    work = random_work(seed, members=3)
    together = advantages(kind, whiten_advantages=whitened, **work)
    for member in range(3):
        rows = work["member_ids"] == member
        alone = advantages(kind, whiten_advantages=whitened, **select(work, rows))
        torch.testing.assert_close(together[rows], alone, rtol=1e-6, atol=1e-7)
    louder = work | {
        "rewards": torch.where(work["member_ids"] == 1, 100 * work["rewards"], work["rewards"])
    }
    rows = work["member_ids"] != 1
    assert torch.equal(advantages(kind, whiten_advantages=whitened, **louder)[rows], together[rows])


def test_invalid_arguments_are_rejected():
    work = random_work(0)
    with pytest.raises(ValueError, match="components"):
        advantages("gdpo", **work | {"components": None})
    lonely = {name: values[:4] for name, values in work.items()}
    for kind in set(KINDS) - {"reinforce"}:  # has no groups
        with pytest.raises(ValueError, match="group"):
            advantages(kind, **lonely)
