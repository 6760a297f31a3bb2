"""Tests of an agent in a single Gymnasium environment, which is reset with seeds 0, 1, ...

and stays open.
"""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import OrderEnforcing

from tests.tiny_steps import step_agent


class Logged(gymnasium.Env):
    """Records its calls; an episode's return is its start plus its number of steps."""

    observation_space = spaces.Box(-1, 1, (4,))
    action_space = spaces.Discrete(2)

    def __init__(self):
        self.log = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.log.append(seed)
        self.worth = self.np_random.random()
        self.steps = 0
        return self.np_random.random(4, dtype=np.float32), {}

    def step(self, action):
        self.steps += 1
        return self.np_random.random(4, dtype=np.float32), self.worth, self.steps == 4, False, {}

    def close(self):
        self.log.append("close")


def agent():
    return step_agent(observation_space=Logged.observation_space, action_space=Logged.action_space)


def test_a_single_environment_is_played_and_stays_open():
    env = Logged()
    value = agent().test(env, episodes=2)
    assert env.log == [0, 1]
    assert value == pytest.approx(
        np.mean([4 * np.random.default_rng(seed).random() for seed in (0, 1)])
    )
    assert agent().test(env) == agent().test(env, episodes=1)


def test_episodes_without_a_limit_are_truncated():
    env = gymnasium.make("CartPole-v1", max_episode_steps=3)
    assert step_agent(normalise_observations=True).test(env, episodes=2) == 3.0
    env.close()


class Endless(Logged):
    """Declares a limit that it does not keep, and pays 1 at each step."""

    max_steps = 1200

    def step(self, action):
        return np.zeros(4, np.float32), 1.0, False, False, {}


def test_a_declared_limit_is_enforced():
    for env in (Endless(), OrderEnforcing(Endless())):
        assert agent().test(env) == 1200


def test_wrong_arguments_raise():
    with pytest.raises(ValueError, match="episodes must be at least 1, got 0"):
        agent().test(Logged(), episodes=0)
    with pytest.raises(ValueError, match="observation_space is"):
        step_agent(observation_space=spaces.Box(0, 1, (3,))).test(Logged())
