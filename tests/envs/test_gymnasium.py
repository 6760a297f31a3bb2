"""GymnasiumGroups: episodes do not depend on the backend, the other rows or num_envs."""

import gymnasium
import numpy as np
import pytest

from evogrpo.envs.control.conversion import ActionNoise
from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups
from evogrpo.envs.control.rollout import PolicyEpisodes
from evogrpo.envs.protocol import SPLITS
from evogrpo.testing.environments import PseudoRandomActor
from tests.envs import probes
from tests.envs.actors import Rule, play_rows

CLASSIC = ["CartPole-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1"]


def draws(rows, width=1, seed=0):
    return ActionNoise(seed, "sample", streams=[()], rows=[rows], width_of=lambda agent: width)


def leaves(tree):
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    return [leaf for part in tree for leaf in leaves(part)] if isinstance(tree, tuple) else [tree]


def episodes(played: PolicyEpisodes):
    """Return each row's episode as bytes and numbers, without padding."""
    columns = [*leaves(played.observations), played.actions, played.log_probs, played.own_rewards]
    if played.action_masks is not None:
        columns.append(played.action_masks)
    lengths = played.present.sum(1)
    return [
        (
            *(column[row, :length].tobytes() for column in columns),
            bool(played.terminated[row]),
            bool(played.truncated[row]),
        )
        for row, length in enumerate(lengths)
    ]


def play(env, starts=3, group_size=4, members=(0, 1), *, uniforms=True, **kwargs):
    """Play groups for every member; rows are ordered by member, start and replica."""
    start_of_row = [start for _ in members for start in range(starts) for _ in range(group_size)]
    member_ids = [member for member in members for _ in range(starts * group_size)]
    actor = PseudoRandomActor(env.action_space)
    per_member = starts * group_size
    table = ActionNoise(
        0, "sample", streams=[(m,) for m in members], rows=[per_member] * len(members), width_of=lambda agent: 1
    )
    played = play_rows(
        env, actor, range(starts), start_of_row, member_ids, uniforms=table if uniforms else None, **kwargs
    )
    return played, actor


@pytest.mark.parametrize("name", CLASSIC)
def test_native_and_gymnasium_environments_play_the_same_episodes(name):
    native = GymnasiumGroups(name, max_episode_steps=60)
    serial = GymnasiumGroups(name, max_episode_steps=60, vectorization="serial", num_envs=5)
    assert native.native
    assert not serial.native
    first, _ = play(native)
    second, _ = play(serial)
    assert episodes(first) == episodes(second)
    for one, other in zip(leaves(first.observations), leaves(second.observations), strict=True):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)  # padding included
    assert native.observation_space == serial.observation_space


@pytest.mark.parametrize("probe", probes.PROBES)
@pytest.mark.parametrize("reseed_noise", [False, True])
def test_processes_play_the_same_episodes(probe, reseed_noise):
    serial = GymnasiumGroups(probe, reseed_noise=reseed_noise)
    assert not serial.native
    with GymnasiumGroups(probe, vectorization="processes", num_envs=3, reseed_noise=reseed_noise) as processes:
        for _ in range(2):  # the second time in the same processes
            assert episodes(play(serial)[0]) == episodes(play(processes)[0])


@pytest.mark.parametrize("num_envs", [1, 2, 7, 100])
@pytest.mark.parametrize("make", [*probes.PROBES, "CartPole-v1"])
def test_results_do_not_depend_on_num_envs(make, num_envs):
    many, _ = play(GymnasiumGroups(make))
    some, actor = play(GymnasiumGroups(make, num_envs=num_envs))
    assert episodes(some) == episodes(many)
    assert max(actor.rows) == min(num_envs, 24)
    assert sum(actor.rows) == some.present.sum()  # no actions are computed for ended episodes


@pytest.mark.parametrize("make", [*probes.PROBES, "CartPole-v1", "Acrobot-v1"])
def test_a_member_plays_the_same_alone_and_in_a_population(make):
    env = GymnasiumGroups(make, num_envs=10, max_episode_steps=50)
    together = episodes(play(env, members=(0, 3, 5))[0])
    for number, member in enumerate((0, 3, 5)):
        assert episodes(play(env, members=(member,))[0]) == together[12 * number : 12 * number + 12]


@pytest.mark.parametrize("vectorization", ["native", "serial"])
def test_reordering_rows_reorders_episodes(vectorization):
    env = GymnasiumGroups("CartPole-v1", vectorization=vectorization, num_envs=4)
    members, starts = np.repeat([2, 0, 1], 4), np.tile([0, 1, 2, 3], 3)
    actor = PseudoRandomActor(env.action_space)
    table = draws(12)
    plain = episodes(play_rows(env, actor, range(4), starts, members, uniforms=table))
    order = np.random.default_rng(0).permutation(12)
    mixed = play_rows(
        env,
        actor,
        range(4),
        starts[order],
        members[order],
        uniforms=lambda agents, rows, t: table(agents, order[rows], t),
    )
    assert episodes(mixed) == [plain[row] for row in order]


def test_episodes_equal_gymnasiums_for_the_same_seed():
    groups = GymnasiumGroups("CartPole-v1", seed=4)
    played = play_rows(groups, PseudoRandomActor(groups.action_space), [7], [0], [0], split="test", uniforms=draws(1))
    env = gymnasium.make("CartPole-v1")
    seen, _ = env.reset(seed=groups.reset_seed("test", 7))
    for t in range(int(played.lengths[0])):
        assert np.array_equal(played.observations[0, t], seen)
        seen, reward, terminated, truncated, _ = env.step(int(played.actions[0, t]))
        assert played.own_rewards[0, t] == reward
    assert (terminated, truncated) == (played.terminated[0], played.truncated[0]) == (True, False)
    assert played.rewards[0] == played.lengths[0]


def balance(seen):
    return (seen[:, 2] + 0.4 * seen[:, 3] + 0.02 * seen[:, 1] + 0.005 * seen[:, 0] > 0).astype(np.int64)


@pytest.mark.parametrize("vectorization", ["native", "serial"])
def test_truncation_and_termination_are_distinguished(vectorization):
    env = GymnasiumGroups("CartPole-v1", vectorization=vectorization, max_episode_steps=60)
    played = play_rows(env, Rule(balance), [0, 1], [0, 1], [0, 0])
    assert played.truncated.all()
    assert not played.terminated.any()
    assert played.lengths.tolist() == [60, 60]
    fallen = play_rows(env, Rule(lambda seen: np.zeros(len(seen), np.int64)), [0, 1], [0, 1], [0, 0])
    assert fallen.terminated.all()
    assert not fallen.truncated.any()


@pytest.mark.parametrize("vectorization", ["native", "serial"])
def test_termination_at_the_time_limit_is_not_truncation(vectorization):
    def left(seen):
        return np.zeros(len(seen), np.int64)

    long = GymnasiumGroups("CartPole-v1", vectorization=vectorization)
    steps = int(play_rows(long, Rule(left), [0], [0], [0]).lengths[0])
    exact = GymnasiumGroups("CartPole-v1", vectorization=vectorization, max_episode_steps=steps)
    played = play_rows(exact, Rule(left), [0], [0], [0])
    assert (played.terminated[0], played.truncated[0]) == (True, False)


def test_factories_get_the_time_limit_and_env_kwargs():
    env = GymnasiumGroups(probes.NoisyWalk, max_episode_steps=2)
    lengths = play(env, starts=10)[0].lengths
    assert lengths.max() == 2
    assert GymnasiumGroups(probes.MatchDiscrete, env_kwargs={"start": 5}).action_space.start == 5
    assert GymnasiumGroups("CartPole-v1", env_kwargs={"sutton_barto_reward": True}).native
    assert not GymnasiumGroups("CartPole-v1", env_kwargs={"render_mode": "rgb_array"}).native
    assert not GymnasiumGroups(lambda: gymnasium.make("CartPole-v1")).native
    assert GymnasiumGroups("CartPole-v1", reseed_noise=True).native  # CartPole has no noise


def test_groups_share_their_start_and_differ_in_action_noise():
    played, _ = play(GymnasiumGroups("CartPole-v1"), starts=3, group_size=4, members=(0,))
    first = played.observations[:, 0].reshape(3, 4, 4)
    assert (first == first[:, :1]).all()
    assert len(np.unique(first[:, 0], axis=0)) == 3
    assert len(set(episodes(played))) > 9
    greedy, _ = play(GymnasiumGroups("CartPole-v1"), starts=3, group_size=4, members=(0,), uniforms=False)
    assert len(set(episodes(greedy))) == 3


def test_starts_are_disjoint_and_stay_when_splits_grow():
    small = GymnasiumGroups("CartPole-v1", train_size=500, validation_size=50, test_size=60, seed=3)
    large = GymnasiumGroups("CartPole-v1", train_size=5000, validation_size=70, test_size=80, seed=3)
    seeds = {split: large.open(split, range(large.size(split))).seeds for split in SPLITS}
    assert [small.size(split) for split in SPLITS] == [500, 50, 60]
    assert len({seed for split in SPLITS for seed in seeds[split]}) == 5150
    assert all(0 <= seed < 2**31 for split in SPLITS for seed in seeds[split])
    for split in SPLITS:
        assert small.open(split, range(small.size(split))).seeds == seeds[split][: small.size(split)]
    # Training starts of another run are disjoint from held-out starts as well.
    other = GymnasiumGroups("CartPole-v1", seed=4).open("train", range(5000)).seeds
    assert max(*other, *seeds["train"]) < min(seeds["validation"] + seeds["test"])
    assert set(other) != set(seeds["train"])


def test_deal_returns_a_prefix_of_the_steps_block():
    env = GymnasiumGroups("CartPole-v1", train_size=10)
    assert env.deal(3, 2, 4) == env.deal(3, 4, 4)[:2]
    assert sorted(start for step in range(5) for start in env.deal(step, 2, 2)) == list(range(10))


def test_noise_is_common_unless_reseed_noise_is_set():
    def still(seen):
        return np.zeros(len(seen), np.int64)

    def noise(reseed, num_envs=None, members=(0, 0, 0)):
        env = GymnasiumGroups(probes.NoisyWalk, reseed_noise=reseed, num_envs=num_envs)
        return play_rows(env, Rule(still), [5], [0] * len(members), members)

    common = noise(False)
    assert len(set(episodes(common))) == 1
    own = noise(True)
    assert len(set(episodes(own))) == 3
    assert (own.observations[:, 0] == common.observations[:, 0]).all()  # the start stays common
    assert episodes(noise(True, num_envs=1)) == episodes(own)
    # The n-th episode of each member from one start has the same noise, so that members are compared fairly.
    both = episodes(noise(True, members=(0, 1, 0, 1)))
    assert both[0] == both[1] == episodes(own)[0]
    assert both[2] == both[3] == episodes(own)[1]


def test_a_failure_in_act_leaves_no_state_behind():
    env = GymnasiumGroups(probes.Masked)
    expected = episodes(play(env)[0])

    class Failing(PseudoRandomActor):
        def act(self, *args, **kwargs):
            if len(self.rows) == 2:
                raise RuntimeError("stop")
            return super().act(*args, **kwargs)

    with pytest.raises(RuntimeError, match="stop"):
        play_rows(env, Failing(env.action_space), [0], [0, 0], [0, 0], uniforms=draws(2))
    assert episodes(play(env)[0]) == expected


def test_members_share_few_environments_evenly():
    env = GymnasiumGroups(probes.ConstantReward, num_envs=6)
    member_ids_of_calls = []

    class Watching(PseudoRandomActor):
        def act(self, observations, member_ids, **rest):
            member_ids_of_calls.append(member_ids.tolist())
            return super().act(observations, member_ids, **rest)

    play_rows(env, Watching(env.action_space), [0], [0] * 24, [4] * 8 + [0] * 8 + [2] * 8)
    assert member_ids_of_calls == [[0, 0, 2, 2, 4, 4]] * 4


def test_temperature_and_base_reach_the_actor():
    env = GymnasiumGroups("CartPole-v1", num_envs=2)

    class Watching(PseudoRandomActor):
        def act(self, observations, member_ids, *, temperature, base, **rest):
            assert base
            assert np.array_equal(temperature, member_ids + 0.5)
            return super().act(observations, member_ids, temperature=temperature, base=base, **rest)

    play_rows(env, Watching(env.action_space), [0], [0] * 4, [1, 0, 1, 0], temperature=[1.5, 0.5, 1.5, 0.5], base=True)
