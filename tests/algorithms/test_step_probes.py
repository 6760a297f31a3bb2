"""Learning on probe environments, each of which isolates one ability.

Evaluation by Stable-Baselines3.
"""

import gymnasium
import pytest

from evogrpo import GRPO, evolve
from evogrpo.config.network import NetworkConfig
from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups
from evogrpo.evolution import Fixed
from tests.envs.probes import (
    DelayedCredit,
    Masked,
    MatchBox,
    MatchDict,
    MatchDiscrete,
    MatchImage,
    MatchMultiBinary,
    MatchMultiDiscrete,
    MatchTuple,
)
from tests.tiny_steps import cart_pole, step_agent

SMALL = NetworkConfig(hidden=(32,))
slow = pytest.mark.slow


def trained(make, *, seed=0, generations=10, target, **options):
    """Train one agent until it reaches a validation fitness; return that of new starts."""
    env = GymnasiumGroups(make, seed=seed, validation_size=32, test_size=64)
    settings = {"group_size": 16, "batch_size": 128, "network": SMALL, "seed": seed} | options
    population = GRPO.population(1, env.observation_space, env.action_space, **settings)
    run = evolve(
        population, env, strategy=Fixed(), generations=generations, steps_per_generation=10,
        samples_per_step=128, target_fitness=target, test_questions=0,
    )  # fmt: skip
    assert [report.generation for report in run]
    return population[0].test(env, split="test")


@pytest.mark.parametrize(
    ("make", "wanted", "options"),
    [
        (MatchDiscrete, 1.0, {}),
        pytest.param(MatchMultiDiscrete, 1.0, {}, marks=slow),
        pytest.param(MatchMultiBinary, 1.0, {}, marks=slow),
        pytest.param(
            MatchBox, 0.9, {"network": NetworkConfig(hidden=(32,), log_std=-1.0)}, marks=slow
        ),
        (
            MatchImage,
            1.0,
            {"network": NetworkConfig(hidden=(16,), convolutions=((4, 4, 4),)), "lr": 3e-3},
        ),
        pytest.param(MatchDict, 1.0, {}, marks=slow),
        pytest.param(MatchTuple, 1.0, {}, marks=slow),
        pytest.param(Masked, 3.0, {}, marks=slow),
    ],
)
def test_small_known_environments_are_solved(make, wanted, options):
    assert trained(make, target=wanted, **options) >= 0.97 * wanted


@pytest.mark.parametrize(
    "advantage",
    [
        "return_to_go_timestep",
        pytest.param("return_to_go_group", marks=slow),
        pytest.param("outcome", marks=slow),
    ],
)
def test_delayed_rewards_are_credited(advantage):
    """The second step pays for the first."""
    assert trained(DelayedCredit, target=1.0, advantage=advantage, gamma=1.0) == 1.0


@pytest.mark.parametrize("num_envs", [0, 3])
def test_evaluate_policy_of_stable_baselines3_gives_the_mean_return(num_envs):
    """Greedy returns from the same reset seeds, by Stable-Baselines3 and by this library."""
    sb3 = pytest.importorskip("stable_baselines3.common")
    env = cart_pole()
    agent = step_agent(seed=2)
    seeds = [env.reset_seed("validation", start) for start in range(6)]

    class Seeded(gymnasium.Wrapper):
        def reset(self, **_):
            return self.env.reset(seed=seeds.pop(0) if seeds else 0)

    def make():
        return sb3.monitor.Monitor(Seeded(gymnasium.make("CartPole-v1", max_episode_steps=40)))

    if num_envs:
        given = sb3.vec_env.DummyVecEnv([make] * num_envs)
    else:
        given = make()
    mean = sb3.evaluation.evaluate_policy(agent, given, n_eval_episodes=6, deterministic=True)[0]
    drawn = sb3.evaluation.evaluate_policy(agent, given, n_eval_episodes=6, deterministic=False)[0]
    if not num_envs:  # environments that run ahead take other seeds
        assert mean == agent.test(env)
    assert 8 <= min(mean, drawn) <= max(mean, drawn) <= 40
    composite = sb3.vec_env.DummyVecEnv([lambda: sb3.monitor.Monitor(MatchDict())] * 2)
    assert (
        0
        <= sb3.evaluation.evaluate_policy(step_agent(GymnasiumGroups(MatchDict)), composite)[0]
        <= 1
    )
