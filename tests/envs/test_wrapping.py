"""Wrappers are applied in order on every backend and are part of the fingerprint."""

import functools

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import FlattenObservation, RescaleAction, TimeAwareObservation, TransformReward
from gymnasium.wrappers.vector import NormalizeReward as VectorWrapper

from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups
from tests.envs import probes
from tests.envs.actors import Rule, play_rows


class Times(gymnasium.RewardWrapper):
    """Multiplies rewards."""

    def __init__(self, env, factor=2.0):
        super().__init__(env)
        self.factor = factor

    def reward(self, reward):
        return self.factor * reward


class Plus(gymnasium.RewardWrapper):
    """Adds one to rewards."""

    def reward(self, reward):
        return reward + 1


class Needs(Times):
    """Requires a factor."""

    def __init__(self, env, factor, also):
        super().__init__(env, factor)


def returns(**options):
    with GymnasiumGroups(probes.ConstantReward, **options) as env:
        return play_rows(
            env, Rule(lambda seen: np.zeros(len(seen), np.int64)), range(3), range(3), [0] * 3
        ).rewards.tolist()


@pytest.mark.parametrize("vectorization", ["serial", "processes"])
@pytest.mark.parametrize(
    ("wrappers", "earned"),
    [
        ([], 1.0),
        ([Times], 2.0),
        ([Times, Plus], 3.0),
        ((Plus, Times), 4.0),
        ([functools.partial(Times, factor=5.0)], 5.0),
        ([lambda env: Plus(Plus(env))], 3.0),
    ],
)
def test_wrappers_are_applied_in_order_on_every_backend(wrappers, earned, vectorization):
    assert returns(wrappers=wrappers, vectorization=vectorization, num_envs=2) == [earned] * 3


def test_spaces_are_those_of_the_outermost_wrapper():
    env = GymnasiumGroups("CartPole-v1", wrappers=[TimeAwareObservation])
    assert env.observation_space.shape == (5,)
    assert not env.native
    assert env.max_episode_steps == 500
    assert GymnasiumGroups("CartPole-v1", wrappers=[]).native
    assert GymnasiumGroups(probes.MatchDict, wrappers=[FlattenObservation]).observation_space.shape == (3,)
    with pytest.raises(ValueError, match="vectorization"):
        GymnasiumGroups("CartPole-v1", wrappers=[Times], vectorization="native")


def test_wrappers_are_part_of_the_fingerprint():
    def identity(*wrappers):
        return GymnasiumGroups(probes.ConstantReward, wrappers=wrappers).fingerprint()

    class Times3(Times):
        def reward(self, reward):
            return 3 * reward

    class Other(Times):
        def reward(self, reward):
            return 4 * reward

    Other.__qualname__ = Other.__name__ = "Times3"
    kinds = [(), (Times,), (Plus,), (Times, Plus), (Plus, Times), (functools.partial(Times, factor=3.0),)]
    kinds += [(functools.partial(Times, factor=4.0),), (Times3,), (Other,)]
    identities = [identity(*wrappers) for wrappers in kinds]
    assert "wrappers" not in identities[0]  # absent without wrappers
    assert len({each.get("wrappers") for each in identities}) == len(kinds)
    assert all({**each, "wrappers": ""} == {**identities[0], "wrappers": ""} for each in identities)
    assert identity(Times, Plus) == identities[3]


@pytest.mark.parametrize(
    ("wrappers", "message"),
    [
        (["FlattenObservation"], "'FlattenObservation' must be a subclass of gymnasium.Wrapper"),
        ([3], "must be a subclass of gymnasium.Wrapper"),
        ([gymnasium.Env], "wrapper Env must be a subclass of gymnasium.Wrapper"),
        ([VectorWrapper], "wrapper NormalizeReward must be a subclass of gymnasium.Wrapper"),
        ([TransformReward], "wrapper TransformReward.*func"),
        ([Times, Needs], "wrapper Needs.*factor"),
        (Times, "wrappers must be a list"),
        ("Times", "wrappers must be a list"),
        ([functools.partial(RescaleAction, min_action=-1.0, max_action=1.0)], "RescaleAction failed .*Error"),
        ([lambda env: 3], "got int"),
    ],
)
def test_invalid_wrappers_raise(wrappers, message):
    with pytest.raises(ValueError, match=message):
        GymnasiumGroups(probes.ConstantReward, wrappers=wrappers)


def test_unsupported_spaces_of_a_wrapped_environment_are_refused():
    class Told(probes.ConstantReward):
        def __init__(self):
            super().__init__()
            self.observation_space = gymnasium.spaces.Dict(seen=self.observation_space, task=gymnasium.spaces.Text(9))

    with pytest.raises(ValueError, match=r"observation_space must .* got Text.*--wrapper"):
        GymnasiumGroups(Told)
