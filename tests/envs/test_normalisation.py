"""Running observation statistics; those of members in training are tested with their policies."""

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers.utils import RunningMeanStd

from evogrpo.envs.control.normalisation import ObservationStatistics, normalised_leaves
from tests.envs import probes

BOX = spaces.Box(-9.0, 9.0, (3,), np.float64)


def test_merging_equals_gymnasiums_running_statistics():
    rng = np.random.default_rng(0)
    running = ObservationStatistics.empty(1, BOX)
    oracle = RunningMeanStd(epsilon=0, shape=(3,))
    for size in (1, 7, 100, 3):
        batch = rng.normal([0, 5, 1e3], [1, 0.1, 10], (size, 3))
        oracle.update(batch)
        one = ObservationStatistics(
            count=np.array([float(size)]),
            mean=batch.mean(0)[None],
            m2=((batch - batch.mean(0)) ** 2).sum(0)[None],
        )
        running = running.merged(one).merged(ObservationStatistics.empty(1, BOX))
        assert running.count[0] == oracle.count
        assert running.mean[0] == pytest.approx(oracle.mean)
        assert running.m2[0] == pytest.approx(oracle.var * oracle.count)


def test_only_float_leaves_change_for_members_with_statistics():
    """Far values are clipped, constant ones stay finite.

    Images and categories cannot be normalised.
    """
    statistics = ObservationStatistics(
        count=np.array([4.0, 1.0]),
        mean=np.array([[1.0, 2.0], [1.0, 2.0]]),
        m2=np.array([[4.0, 0.0], [4.0, 0.0]]),
    )
    value = np.array([[1000.0, 2.0], [-1000.0, 2.5], [3.0, 2.0], [1000.0, 2.0]], np.float32)
    which = np.array([0, 1, 2, 3])
    kept, normalised = statistics.normalise([which, value], (1,), np.array([0, 0, 0, 1]))
    assert kept is which
    assert normalised.tolist() == [[10, 0], [-10, 10], [pytest.approx(2), 0], [1000, 2]]
    assert normalised_leaves(probes.MatchTuple.observation_space) == (1,)
    with pytest.raises(ValueError, match="normalise_observations needs"):
        ObservationStatistics.empty(1, probes.MatchImage.observation_space)
