"""Tiny populations of several agents, their environment, and runs."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from evogrpo import (
    HyperparameterConfig,
    MultiAgentGRPO,
    NetworkConfig,
    PettingZooGroups,
    Population,
    RLParameter,
)
from evogrpo.training.trainer import Trainer
from tests.envs import joint_probes
from tests.tiny_steps import start_run

TEAM_SPACE = HyperparameterConfig(
    lr=RLParameter(min=1e-3, max=1e-1, scale="log"), group_size=RLParameter(choices=[2, 4, 8])
)
QUICK: dict[str, Any] = {"generations": 3, "steps_per_generation": 2, "samples_per_step": 16}


def team_env(make: Callable[..., Any] = joint_probes.Favours, **options: Any) -> PettingZooGroups:
    return PettingZooGroups(
        make, **({"validation_size": 20, "test_size": 20, "score": "sum"} | options)
    )


def team_population(size: int, env: PettingZooGroups | None = None, **options: Any) -> Population:
    """Return teams with one policy per prefix of the agents' names."""
    env = env or team_env()
    defaults = {
        "policies": "prefix",
        "hp_config": TEAM_SPACE,
        "network": NetworkConfig(hidden=(16,)),
        "lr": 2e-2,
    }
    return MultiAgentGRPO.population(
        size, env.observation_spaces, env.action_spaces, **(defaults | options)
    )


def team_run(
    folder: Path | None,
    *,
    size: int = 3,
    env: PettingZooGroups | None = None,
    options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Trainer:
    """Return a small run that has not started, with evolving hyperparameters; see `start_run`."""
    env = env or team_env()
    return start_run(
        team_population(size, env, **dict(options or {})), env, folder, **(QUICK | settings)
    )
