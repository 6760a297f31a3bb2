"""Agents in Stable-Baselines3's evaluation, vector environments and identity environments."""

import gymnasium
import pytest

pytest.importorskip("stable_baselines3")
from stable_baselines3.common.envs import (  # only where it is installed
    IdentityEnv,
    IdentityEnvBox,
    IdentityEnvMultiBinary,
    IdentityEnvMultiDiscrete,
)
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

from evogrpo import GRPO, evolve
from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups
from evogrpo.evolution import Fixed
from tests.envs.probes import MatchDict
from tests.tiny_steps import cart_pole, step_agent


def monitored(make):
    return lambda: Monitor(make())


@pytest.mark.parametrize("num_envs", [0, 3])
def test_evaluate_policy_gives_the_mean_return(num_envs):
    """Greedy returns from the same reset seeds, by Stable-Baselines3 and by this library."""
    env, agent = cart_pole(), step_agent(seed=2)
    seeds = [env.reset_seed("validation", start) for start in range(6)]

    class Seeded(gymnasium.Wrapper):
        def reset(self, **_):
            return self.env.reset(seed=seeds.pop(0) if seeds else 0)

    def make():
        return Monitor(Seeded(gymnasium.make("CartPole-v1", max_episode_steps=40)))

    vector_env = DummyVecEnv([make] * num_envs) if num_envs else make()
    mean, _ = evaluate_policy(agent, vector_env, n_eval_episodes=6, deterministic=True)
    if not num_envs:  # environments that run ahead take other seeds
        assert mean == agent.test(env)
    drawn, _ = evaluate_policy(agent, vector_env, n_eval_episodes=6, deterministic=False)
    assert 8 <= min(mean, drawn) <= max(mean, drawn) <= 40


def test_evaluate_policy_takes_composite_observations():
    agent = step_agent(GymnasiumGroups(MatchDict))
    mean, _ = evaluate_policy(agent, DummyVecEnv([monitored(MatchDict)] * 2), n_eval_episodes=4)
    assert 0 <= mean <= 1


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: IdentityEnv(10), {}),
        (lambda: IdentityEnvBox(eps=0.5), {"lr": 3e-3}),
        (lambda: IdentityEnvMultiBinary(4), {}),
        (lambda: IdentityEnvMultiDiscrete(4), {}),
    ],
    ids=["discrete", "box", "multi_binary", "multi_discrete"],
)
def test_identity_environments_are_solved(make, options):
    """The action must equal the observation 100 times; SB3's own tests require 90."""
    env = GymnasiumGroups(lambda: Repeatable(make()), validation_size=2)
    population = GRPO.population(1, env.observation_space, env.action_space, group_size=8, gamma=0.0, **options)
    run = evolve(
        population, env, strategy=Fixed(), generations=12, steps_per_generation=6, samples_per_step=16,
        test_questions=0, target_fitness=95,
    )  # fmt: skip
    assert [report.generation for report in run]
    mean, _ = evaluate_policy(population[0], Monitor(make()), n_eval_episodes=10)
    assert mean > 90


class Repeatable(gymnasium.Wrapper):
    """An identity environment that uses its reset seed; SB3's do not."""

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.env.unwrapped.action_space.seed(seed)
        return self.env.reset(seed=seed)
