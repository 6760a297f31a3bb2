"""GymnasiumGroups: episodes depend on seed, start, member and row, and on nothing else."""

from itertools import chain

import gymnasium
import numpy as np
import pytest

from evogrpo.envs.control.action_noise import ActionNoise
from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups
from evogrpo.envs.protocol import SPLITS
from evogrpo.randomness import generator
from evogrpo.testing.environments import PseudoRandomActor
from tests.envs import probes
from tests.envs.actors import STILL, Rule, groups, play_rows

MEMBERS = (0, 1)


def noise(rows, *, streams=((),), width=1):
    return ActionNoise(
        0, "sample", streams=list(streams), rows=list(rows), width_of=lambda agent: width
    )


@pytest.mark.parametrize(
    ("probe", "reseed_noise"),
    [(probes.MatchDict, False), (probes.Masked, False), (probes.NoisyWalk, True)],
)
def test_processes_play_the_same_episodes(probe, reseed_noise):
    expected = groups(GymnasiumGroups(probe, reseed_noise=reseed_noise), MEMBERS)
    with GymnasiumGroups(
        probe, vectorization="processes", num_envs=3, reseed_noise=reseed_noise
    ) as env:
        for _ in range(2):  # the second time in the same processes
            assert groups(env, MEMBERS) == expected


@pytest.mark.parametrize(
    "make", [probes.MatchTuple, probes.Masked, probes.NoisyWalk, "CartPole-v1"]
)
def test_results_do_not_depend_on_num_envs(make):
    few = groups(GymnasiumGroups(make, num_envs=7), MEMBERS)
    many = groups(GymnasiumGroups(make, num_envs=100), MEMBERS)
    assert few == many


def test_episodes_equal_gymnasiums_for_the_same_seed():
    groups = GymnasiumGroups("CartPole-v1", seed=4)
    played = play_rows(
        groups,
        PseudoRandomActor(groups.action_space),
        [7],
        [0],
        [0],
        split="test",
        uniforms=noise([1]),
    )
    env = gymnasium.make("CartPole-v1")
    seen, _ = env.reset(seed=groups.reset_seed("test", 7))
    for t in range(int(played.lengths[0])):
        assert np.array_equal(played.observations[0, t], seen)
        seen, reward, terminated, truncated, _ = env.step(int(played.actions[0, t]))
        assert played.own_rewards[0, t] == reward
    assert (terminated, truncated) == (played.terminated[0], played.truncated[0]) == (True, False)
    assert played.rewards[0] == played.lengths[0]


@pytest.mark.parametrize("vectorization", ["native", "serial"])
def test_truncation_and_termination_are_distinguished(vectorization):
    def ends(actor, limit):
        env = GymnasiumGroups("CartPole-v1", vectorization=vectorization, max_episode_steps=limit)
        played = play_rows(env, actor, [0], [0], [0])
        return int(played.lengths[0]), bool(played.terminated[0]), bool(played.truncated[0])

    assert ends(Rule(lambda seen: (seen @ (0.005, 0.02, 1, 0.4) > 0).astype(np.int64)), 60) == (
        60,
        False,
        True,
    )
    steps, *fallen = ends(STILL, 60)
    assert fallen == [True, False]
    # Termination at the time limit is not truncation.
    assert ends(STILL, steps) == (steps, True, False)
    assert ends(STILL, steps - 1) == (steps - 1, False, True)


def test_factories_get_env_kwargs():
    assert GymnasiumGroups(probes.MatchDiscrete, env_kwargs={"start": 5}).action_space.start == 5
    assert GymnasiumGroups("CartPole-v1", env_kwargs={"sutton_barto_reward": True}).native
    assert not GymnasiumGroups("CartPole-v1", env_kwargs={"render_mode": "rgb_array"}).native
    assert not GymnasiumGroups(lambda: gymnasium.make("CartPole-v1")).native
    assert GymnasiumGroups("CartPole-v1", reseed_noise=True).native  # CartPole has no noise


def test_starts_are_disjoint_and_stay_when_splits_grow():
    small = GymnasiumGroups("CartPole-v1", train_size=500, validation_size=50, test_size=60, seed=3)
    large = GymnasiumGroups(
        "CartPole-v1", train_size=5000, validation_size=70, test_size=80, seed=3
    )
    seeds = {split: large.make_batch(split, range(large.size(split))).seeds for split in SPLITS}
    assert [small.size(split) for split in SPLITS] == [500, 50, 60]
    all_seeds = set(chain.from_iterable(seeds.values()))
    assert len(all_seeds) == 5150
    assert all(0 <= seed < 2**31 for seed in all_seeds)
    for split in SPLITS:
        assert (
            small.make_batch(split, range(small.size(split))).seeds
            == seeds[split][: small.size(split)]
        )
    # Training starts of another run are disjoint from held-out starts as well.
    other = GymnasiumGroups("CartPole-v1", seed=4).make_batch("train", range(5000)).seeds
    assert max(*other, *seeds["train"]) < min(seeds["validation"] + seeds["test"])
    assert set(other) != set(seeds["train"])


def test_noise_is_common_unless_reseed_noise_is_set():
    def walks(reseed, num_envs=None, members=(0, 0, 0)):
        env = GymnasiumGroups(probes.NoisyWalk, reseed_noise=reseed, num_envs=num_envs)
        played = play_rows(env, STILL, [5], [0] * len(members), members)
        return played.rewards.tolist(), played.observations[:, 0]

    common, start = walks(False)
    assert len(set(common)) == 1
    reseeded, reseeded_start = walks(True)
    assert len(set(reseeded)) == 3
    assert (reseeded_start == start).all()  # the start stays common
    assert walks(True, num_envs=1)[0] == reseeded
    # The n-th episode of each member from one start has the same noise, so that members are
    # compared fairly.
    assert walks(True, members=(0, 1, 0, 1))[0] == [
        reseeded[0],
        reseeded[0],
        reseeded[1],
        reseeded[1],
    ]


def test_action_noise_does_not_depend_on_order_or_other_rows_and_agents():
    """Row r of a stream uses entry [r, t] of generators of 64, 128, ... steps."""
    chunks = [
        generator(0, "sample", 3, 1, n).random((4, 64 << n, 2), dtype=np.float32) for n in range(3)
    ]
    expected = np.concatenate(chunks, axis=1)
    draws = noise([2, 4], streams=[(3, 0), (3, 1)], width=2)
    for rows, t in (
        ([5, 3, 4], [299, 0, 150]),
        ([4], [1]),
        ([3, 3], [64, 63]),
        ([5, 3, 4], [299, 0, 150]),
    ):
        assert np.array_equal(
            draws((), np.array(rows), np.array(t)), expected[np.array(rows) - 2, t]
        )
    rows = np.array([3, 4, 3])
    t = np.array([0, 70, 1])
    both = draws(["a", "b"] * 3, rows.repeat(2), t.repeat(2))
    assert np.array_equal(both[::2], draws(["a"] * 3, rows, t))
    assert len(np.unique(both)) == 12
