"""Running observation statistics per member."""

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers.utils import RunningMeanStd

from evogrpo.envs.control.actions import ActionNoise
from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups
from evogrpo.envs.control.observations import ObservationStatistics
from evogrpo.testing.environments import PseudoRandomActor
from tests.envs import probes


def play(env, statistics, members=(0, 1)):
    rows = [member for member in members for _ in range(6)]
    draws = ActionNoise(0, "sample", streams=[(m,) for m in members], rows=[6] * len(members), width=1)
    actor = PseudoRandomActor(env.action_space)
    return env.play(actor, range(3), [0, 0, 1, 1, 2, 2] * len(members), rows, uniforms=draws, statistics=statistics)


def seen_by(played, raw, member, members=2):
    rows = np.arange(len(raw)) // (len(raw) // members) == member
    return raw[rows][played.present[rows]]


def test_the_first_iteration_counts_observations_without_normalising():
    env = GymnasiumGroups("CartPole-v1")
    empty = ObservationStatistics.empty(2, env.observation_space)
    played, plain = play(env, empty), play(env, None)
    assert np.array_equal(played.observations, plain.observations)
    assert plain.observed is None
    for member in (0, 1):
        raw = seen_by(plain, plain.observations, member).astype(np.float64)
        assert played.observed.count[member] == len(raw)
        assert played.observed.mean[member] == pytest.approx(raw.mean(0))
        assert played.observed.m2[member] == pytest.approx(raw.var(0) * len(raw))


def test_later_iterations_normalise_by_the_frozen_statistics():
    env = GymnasiumGroups(probes.NoisyWalk)
    empty = ObservationStatistics.empty(2, env.observation_space)
    statistics = empty.merged(play(env, empty).observed)
    before = (statistics.count.copy(), statistics.mean.copy(), statistics.m2.copy())
    played = play(env, statistics)
    std = np.sqrt(statistics.m2 / statistics.count[:, None])
    for member in (0, 1):
        shown = seen_by(played, played.observations, member)
        raw = shown * std[member] + statistics.mean[member]
        assert np.abs(shown).max() < 10
        assert raw.mean(0) == pytest.approx(played.observed.mean[member], abs=1e-6)
    after = (statistics.count, statistics.mean, statistics.m2)
    assert all(np.array_equal(*pair) for pair in zip(before, after, strict=True))
    assert (played.observations[~played.present] == 0).all()


def test_the_policy_sees_the_recorded_observations():
    env = GymnasiumGroups("CartPole-v1", num_envs=5)
    empty = ObservationStatistics.empty(2, env.observation_space)
    statistics = empty.merged(play(env, empty).observed)
    shown = []

    class Watching(PseudoRandomActor):
        def act(self, observations, member_ids, **rest):
            shown.extend(map(bytes, observations))
            return super().act(observations, member_ids, **rest)

    played = env.play(Watching(env.action_space), [0, 1], [0, 1] * 4, [0] * 4 + [1] * 4, statistics=statistics)
    assert sorted(shown) == sorted(map(bytes, played.observations[played.present]))


def test_members_have_separate_statistics():
    env = GymnasiumGroups("CartPole-v1", num_envs=7)
    empty = ObservationStatistics.empty(4, env.observation_space)
    statistics = empty.merged(play(env, empty, members=(1, 3)).observed)
    assert statistics.count[[0, 2]].tolist() == [0, 0]
    together, alone = play(env, statistics, members=(1, 3)), play(env, statistics, members=(3,))
    t = alone.present.shape[1]
    assert np.array_equal(together.observations[6:, :t], alone.observations)
    for name in ("count", "mean", "m2"):
        assert np.array_equal(getattr(together.observed, name)[3], getattr(alone.observed, name)[3])


def test_merging_equals_gymnasiums_running_statistics():
    rng = np.random.default_rng(0)
    space = spaces.Box(-9.0, 9.0, (3,), np.float64)
    running = ObservationStatistics.empty(1, space)
    oracle = RunningMeanStd(epsilon=0, shape=(3,))
    everything = []
    for size in (1, 7, 100, 3):
        batch = rng.normal([0, 5, 1e3], [1, 0.1, 10], (size, 3))
        oracle.update(batch)
        everything.append(batch)
        one = ObservationStatistics(
            count=np.array([float(size)]), mean=batch.mean(0)[None], m2=((batch - batch.mean(0)) ** 2).sum(0)[None]
        )
        running = running.merged(one).merged(ObservationStatistics.empty(1, space))
        assert running.count[0] == oracle.count
        assert running.mean[0] == pytest.approx(oracle.mean)
        assert running.m2[0] / size == pytest.approx(oracle.var * oracle.count / size)
    assert running.mean[0] == pytest.approx(np.concatenate(everything).mean(0))


def test_only_float_leaves_of_composite_observations_change():
    env = GymnasiumGroups(probes.MatchTuple)
    empty = ObservationStatistics.empty(2, env.observation_space)
    assert empty.mean.shape == (2, 1)
    statistics = empty.merged(play(env, empty).observed)
    normalised, plain = play(env, statistics), play(env, None)
    assert np.array_equal(normalised.observations[0], plain.observations[0])
    assert not np.array_equal(normalised.observations[1][0], plain.observations[1][0])


def test_far_observations_are_clipped_and_constant_ones_stay_finite():
    statistics = ObservationStatistics(count=np.array([4.0]), mean=np.array([[1.0, 2.0]]), m2=np.array([[4.0, 0.0]]))
    value = np.array([[1000.0, 2.0], [-1000.0, 2.5]], np.float32)
    (shown,) = statistics.normalise([value], (0,), np.zeros(2, np.int64))
    assert shown.tolist() == [[10, 0], [-10, 10]]


def test_images_and_categories_cannot_be_normalised():
    with pytest.raises(ValueError, match="floating-point boxes, not in Box"):
        ObservationStatistics.empty(1, probes.MatchImage().observation_space)


def test_statistics_must_cover_every_member():
    env = GymnasiumGroups("CartPole-v1")
    with pytest.raises(ValueError, match=r"member_ids must lie in \[0, 1\)"):
        play(env, ObservationStatistics.empty(1, env.observation_space))
