"""Learning on probe environments, each of which isolates one ability."""

import pytest

from evogrpo import GRPO, evolve
from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups
from evogrpo.evolution import Fixed
from evogrpo.models.networks.architecture import NetworkConfig
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

SMALL = NetworkConfig(hidden=(32,))


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
        (MatchMultiDiscrete, 1.0, {}),
        (MatchMultiBinary, 1.0, {}),
        (MatchBox, 0.9, {"network": NetworkConfig(hidden=(32,), log_std=-1.0)}),
        (MatchImage, 1.0, {"network": NetworkConfig(hidden=(16,), convolutions=((4, 4, 4),)), "lr": 3e-3}),
        (MatchDict, 1.0, {}),
        (MatchTuple, 1.0, {}),
        (Masked, 3.0, {}),
    ],
)
def test_probes_are_solved(make, wanted, options):
    assert trained(make, target=wanted, **options) >= 0.97 * wanted


@pytest.mark.parametrize("advantage", ["return_to_go_timestep", "return_to_go_group", "outcome"])
def test_delayed_rewards_are_credited(advantage):
    """The second step pays for the first; with gamma 0 this cannot be learned."""
    assert trained(DelayedCredit, target=1.0, advantage=advantage, gamma=1.0) == 1.0


def test_gamma_0_ignores_delayed_rewards():
    assert trained(DelayedCredit, target=1.0, generations=2, gamma=0.0) < 0.8
