"""Running observation statistics per member."""

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers.utils import RunningMeanStd

from evogrpo.algorithms.policies.network_policy import StackedPolicy
from evogrpo.algorithms.policies.settings import NetworkSettings
from evogrpo.envs.control.conversion import ActionNoise, ObservationStatistics
from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups
from tests.envs import probes
from tests.envs.actors import play_rows


def policy_for(env, size):
    settings = NetworkSettings(normalise_observations=True)
    return StackedPolicy(env.observation_space, env.action_space, size, settings)


def play(env, policy, members):
    """Play 6 episodes of each member; return them, their members, and the random numbers of actions."""
    rows = np.repeat(members, 6)
    width = policy.bank.distribution.uniforms_per_action
    noise = ActionNoise(
        0, "sample", streams=[(m,) for m in members], rows=[6] * len(members), width_of=lambda agent: width
    )
    return play_rows(env, policy, range(3), [0, 0, 1, 1, 2, 2] * len(members), rows, uniforms=noise), rows, noise


def learn_statistics(env, policy, members):
    played, rows, _ = play(env, policy, members)
    policy.update_statistics(policy.normalised(played, rows)[1])


def test_the_policy_acts_on_normalised_observations():
    env = GymnasiumGroups(probes.NoisyWalk, num_envs=5)
    policy = policy_for(env, 2)
    learn_statistics(env, policy, (0, 1))
    played, rows, noise = play(env, policy, (0, 1))
    normalised, summary = policy.normalised(played, rows)
    row, t = np.nonzero(played.present)
    acted = policy.bank.act(normalised[row, t], rows[row], uniforms=noise((), row, t))
    assert np.array_equal(acted.actions, played.actions[row, t])
    assert (normalised[~played.present] == 0).all()
    for member in (0, 1):
        raw = played.observations[rows == member][played.present[rows == member]].astype(np.float64)
        assert summary.count[member] == len(raw)
        assert summary.mean[member] == pytest.approx(raw.mean(0))
        assert summary.m2[member] == pytest.approx(raw.var(0) * len(raw))


def test_members_have_separate_statistics():
    env = GymnasiumGroups("CartPole-v1", num_envs=7)
    policy = policy_for(env, 4)
    learn_statistics(env, policy, (1, 3))
    assert policy.statistics.count[[0, 2]].tolist() == [0, 0]
    (together, both, _), (alone, own, _) = play(env, policy, (1, 3)), play(env, policy, (3,))
    normalised, summary = policy.normalised(together, both)
    shown_alone, summary_alone = policy.normalised(alone, own)
    assert np.array_equal(normalised[6:, : alone.present.shape[1]], shown_alone)
    for name in ("count", "mean", "m2"):
        assert np.array_equal(getattr(summary, name)[3], getattr(summary_alone, name)[3])


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
    policy = policy_for(env, 2)
    assert policy.statistics.mean.shape == (2, 1)
    learn_statistics(env, policy, (0, 1))
    played, rows, _ = play(env, policy, (0, 1))
    normalised, _ = policy.normalised(played, rows)
    assert np.array_equal(normalised[0], played.observations[0])
    assert not np.array_equal(normalised[1][0], played.observations[1][0])


def test_far_observations_are_clipped_and_constant_ones_stay_finite():
    statistics = ObservationStatistics(count=np.array([4.0]), mean=np.array([[1.0, 2.0]]), m2=np.array([[4.0, 0.0]]))
    value = np.array([[1000.0, 2.0], [-1000.0, 2.5]], np.float32)
    (normalised,) = statistics.normalise([value], (0,), np.zeros(2, np.int64))
    assert normalised.tolist() == [[10, 0], [-10, 10]]


def test_images_and_categories_cannot_be_normalised():
    with pytest.raises(ValueError, match="floating-point boxes, not in Box"):
        ObservationStatistics.empty(1, probes.MatchImage().observation_space)
