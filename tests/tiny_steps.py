"""Tiny agents and populations of small networks, environments for them, and runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from evogrpo import GRPO, HyperparameterConfig, Population, RLParameter, Tournament
from evogrpo.config.network import ArchitectureLimits, NetworkConfig
from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups
from evogrpo.envs.protocol import GroupEnvironment
from evogrpo.evolution import FitnessConfig, Strategy
from evogrpo.training.configuration.sections import LoggingConfig
from evogrpo.training.proposals import Proposer
from evogrpo.training.run_dir import RunDir
from evogrpo.training.schedule import Schedule
from evogrpo.training.trainer import Trainer

STEP_SPACE = HyperparameterConfig(
    lr=RLParameter(min=1e-3, max=3e-2, scale="log"),
    clip_coef=RLParameter(min=0.1, max=0.4),
    group_size=RLParameter(choices=[2, 4, 8]),
)
LIMITS = ArchitectureLimits(min_units=2, max_units=12, unit_steps=(2, 3), probability=0.8)
QUICK: dict[str, Any] = {
    "generations": 3,
    "steps_per_generation": 2,
    "samples_per_step": 8,
    "test_questions": 4,
}


def cart_pole(**options: Any) -> GymnasiumGroups:
    """Return short episodes of CartPole, few of them held out."""
    return GymnasiumGroups(
        "CartPole-v1", **({"max_episode_steps": 40, "validation_size": 6} | options)
    )


def step_options(env: GymnasiumGroups, **options: Any) -> dict[str, Any]:
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
    if "actor_network" in options:
        network = {}
    else:
        network = {"network": NetworkConfig(hidden=(6, 5))}
    return spaces | network | {"group_size": 4, "batch_size": 64} | options


def step_agent(env: GymnasiumGroups | None = None, **options: Any) -> GRPO:
    return GRPO(**step_options(env or cart_pole(), **options))


def step_population(size: int, env: GymnasiumGroups | None = None, **options: Any) -> Population:
    return GRPO.population(size, **step_options(env or cart_pole(), **options))


def start_run(
    population: Population,
    env: GroupEnvironment,
    folder: Path | None,
    *,
    strategy: Strategy | None = None,
    fitness: object = "validation",
    proposer: Proposer | None = None,
    **schedule: Any,
) -> Trainer:
    """Return a run that has not started, without TensorBoard; its default is a tournament."""
    return Trainer(
        population,
        env,
        schedule=Schedule(**schedule),
        strategy=strategy or Tournament(z=0.0),
        fitness=FitnessConfig.of(fitness),
        run_dir=None if folder is None else RunDir(folder, LoggingConfig(trackers=())),
        proposer=proposer,
    )


def step_run(
    folder: Path | None,
    *,
    size: int = 3,
    env: GymnasiumGroups | None = None,
    options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Trainer:
    """Return a small run that has not started, with evolving hyperparameters and networks.

    See `start_run`.
    """
    env = env or cart_pole()
    chosen = {"hp_config": STEP_SPACE, "update_epochs": 2, "evolve_network": LIMITS} | dict(
        options or {}
    )
    return start_run(step_population(size, env, **chosen), env, folder, **(QUICK | settings))


def played(agent: GRPO, starts: int = 2, size: int = 4, steps: int = 20) -> tuple[Any, ...]:
    """Return experiences from a user's own loop over gymnasium environments."""
    import gymnasium
    import numpy as np

    shape = (starts, size, steps)
    observations = np.zeros((*shape, 4), np.float32)
    actions = np.zeros(shape, np.int64)
    masks = np.zeros(shape, bool)
    rewards = np.zeros(shape)
    for start in range(starts):
        for replica in range(size):
            env = gymnasium.make("CartPole-v1", max_episode_steps=steps)
            seen, _ = env.reset(seed=start)
            for t in range(steps):
                index = (start, replica, t)
                observations[index] = seen
                masks[index] = True
                actions[index] = agent.get_action(seen, training=True)
                seen, rewards[index], terminated, truncated, _ = env.step(int(actions[index]))
                if terminated or truncated:
                    break
    return observations, actions, masks, rewards


class OwnNetwork(torch.nn.Module):
    """A user-defined network for CartPole."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 8)
        self.second = torch.nn.Linear(8, 2)

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(observations)))
